"""Offline batch generation over a Ray cluster: `jaxinfer batch --ray` as a script, for `ray job submit`.

    ray job submit --working-dir . -- python scripts/batch_ray.py \
        -i in.jsonl -o out.jsonl --model smollm2-135m-instruct --ray-workers 4

Options are those of `jaxinfer batch`. Input and output lie on the machine that runs this script, the head of the
cluster as a rule; jaxinfer, with its extra `ray`, has to be installed on all machines. Submitted again with the same
files, it does what is missing.
"""

import sys

from jaxinfer.cli.main import main

if __name__ == "__main__":
    words = sys.argv[1:]
    named = any(word == "--ray" or word.startswith("--ray=") for word in words)
    sys.exit(main(["batch", *([] if named else ["--ray"]), *words]))
