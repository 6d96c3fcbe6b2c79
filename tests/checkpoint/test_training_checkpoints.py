"""Checkpoints of training runs: a TrainState of our own module, and trees of other names through a name map."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.training.train_state import TrainState

from jaxinfer.checkpoint import Sources, load_orbax
from jaxinfer.checkpoint.name_map import resolve_names
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import Decoder

CONFIG = ModelConfig(64, 32, 48, 3, 4, 2)
GROUP, HEAD, WIDTH = 2, 8, 32


def same(left, right) -> None:
    jax.tree.map(np.testing.assert_array_equal, left, right)


@pytest.fixture
def params(random_params):
    return jax.tree.map(jnp.asarray, random_params(CONFIG))


@pytest.fixture
def state(params):
    """A TrainState with Adam's moments, which are trees of the same names, after a step that made them differ."""
    state = TrainState.create(apply_fn=Decoder(CONFIG).apply, params=params, tx=optax.adam(1e-2))
    return state.apply_gradients(grads=jax.tree.map(lambda leaf: leaf * 0.1, params))


def save(path, tree) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)


def test_a_train_state(state, tmp_path):
    save(tmp_path / "state", state)
    same(load_orbax(tmp_path / "state", CONFIG), state.params)


def test_variables_and_names_around_them(params, tmp_path):
    save(tmp_path / "a", {"params": params, "batch_stats": {"mean": jnp.ones(3)}})
    same(load_orbax(tmp_path / "a", CONFIG), params)
    save(tmp_path / "b", {"model": {"params": params}, "step": 3})
    same(load_orbax(tmp_path / "b", CONFIG), params)


def test_a_checkpoint_manager_gives_its_last_step(params, tmp_path):
    older = jax.tree.map(lambda leaf: leaf + 1, params)
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        for step, tree in ((5, older), (100, params)):
            manager.save(step, args=ocp.args.StandardSave({"params": tree}))
        manager.wait_until_finished()
    (tmp_path / "run" / "200.orbax-checkpoint-tmp-7").mkdir()  # a save that was killed
    same(load_orbax(tmp_path / "run", CONFIG), params)
    same(load_orbax(tmp_path / "run", CONFIG, step=5), older)
    same(load_orbax(tmp_path / "run" / "5", CONFIG), older)
    with pytest.raises(ValueError, match="step=6 is not in .*run; it has 5, 100"):
        load_orbax(tmp_path / "run", CONFIG, step=6)


def test_several_trees_in_a_step(params, tmp_path):
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        items = {"model": ocp.args.StandardSave(params), "other": ocp.args.StandardSave({"x": jnp.ones(2)})}
        checkpointer.save(tmp_path / "step", args=ocp.args.Composite(**items))
    with pytest.raises(ValueError, match="several trees; give one of them: model, other"):
        load_orbax(tmp_path / "step", CONFIG)
    same(load_orbax(tmp_path / "step" / "model", CONFIG), params)


def foreign(params):
    """The same network as Flax people often write it: [in, out] kernels, unfused projections, blocks in a list."""
    blocks = []
    for i in range(CONFIG.num_hidden_layers):
        layer = params[f"layers_{i}"]
        qkv, gate_up = layer["attn"]["qkv"]["kernel"], layer["mlp"]["gate_up"]["kernel"]
        blocks.append(
            {
                "norm_1": layer["attn_norm"]["scale"],
                "norm_2": layer["mlp_norm"]["scale"],
                "q": {"kernel": qkv[:, :GROUP].reshape(-1, WIDTH).T},
                "k": {"kernel": qkv[:, GROUP].reshape(-1, WIDTH).T},
                "v": {"kernel": qkv[:, GROUP + 1].reshape(-1, WIDTH).T},
                "o": {"kernel": layer["attn"]["out"]["kernel"].reshape(WIDTH, -1).T},
                "gate": {"kernel": gate_up[0].T},
                "up": {"kernel": gate_up[1].T},
                "down": {"kernel": layer["mlp"]["down"]["kernel"].T},
            }
        )
    top = {"wte": params["embed"]["embedding"], "ln": params["final_norm"]["scale"]}
    return {"net": {**top, "blocks": blocks, "head": params["lm_head"]["kernel"].T}, "opt": {"count": jnp.ones(())}}


def fuse_qkv(q, k, v):
    heads = CONFIG.num_key_value_heads
    q = q.T.reshape(heads, GROUP, HEAD, WIDTH)
    return np.concatenate([q, k.T.reshape(heads, 1, HEAD, WIDTH), v.T.reshape(heads, 1, HEAD, WIDTH)], axis=1)


def transposed(*shape):
    return lambda kernel: kernel.T.reshape(shape)


BLOCK = "net/blocks/{i}"
NAMES = {
    "embed/embedding": "net/wte",
    "final_norm/scale": "net/ln",
    "lm_head/kernel": Sources("net/head", np.transpose),
    "layers_{i}/attn_norm/scale": f"{BLOCK}/norm_1",
    "layers_{i}/mlp_norm/scale": f"{BLOCK}/norm_2",
    "layers_{i}/attn/qkv/kernel": Sources(tuple(f"{BLOCK}/{part}/kernel" for part in "qkv"), fuse_qkv),
    "layers_{i}/attn/out/kernel": Sources(f"{BLOCK}/o/kernel", transposed(WIDTH, 2, GROUP, HEAD)),
    "layers_{i}/mlp/gate_up/kernel": Sources(
        (f"{BLOCK}/gate/kernel", f"{BLOCK}/up/kernel"), lambda gate, up: np.stack([gate.T, up.T])
    ),
    "layers_{i}/mlp/down/kernel": Sources(f"{BLOCK}/down/kernel", np.transpose),
}


@pytest.fixture
def theirs(params, tmp_path):
    save(tmp_path / "theirs", foreign(params))
    return tmp_path / "theirs"


def test_a_mapping_with_fused_leaves(theirs, params):
    same(load_orbax(theirs, CONFIG, NAMES), params)


def test_a_function(theirs, params):
    def name_map(leaf: str):
        first, _, rest = leaf.partition("/")
        if not first.startswith("layers_"):
            return NAMES[leaf]
        i, source = first.removeprefix("layers_"), NAMES[f"layers_{{i}}/{rest}"]
        source = Sources(source) if isinstance(source, str) else source
        return Sources(tuple(path.format(i=i) for path in source.paths), source.transform)

    same(load_orbax(theirs, CONFIG, name_map), params)


def test_a_state_of_flax_nnx(params, tmp_path):
    """Its variables are nodes of the saved tree, and their arrays lie under "value"."""
    states = {"model": nnx.State(foreign(params)["net"]), "opt": {"mu": nnx.State(foreign(params)["net"])}}
    save(tmp_path / "nnx", jax.tree.map(nnx.Param, states))
    name_map = {}
    for leaf, source in NAMES.items():
        source = Sources(source) if isinstance(source, str) else source
        paths = tuple(f"{path.replace('net/', 'model/')}/value" for path in source.paths)
        name_map[leaf] = Sources(paths, source.transform)
    same(load_orbax(tmp_path / "nnx", CONFIG, name_map), params)


def test_stacked_layers_are_read_once_and_cut(params, tmp_path, monkeypatch):
    from jaxinfer.checkpoint import orbax_io

    layers = [params[f"layers_{i}"] for i in range(3)]
    rest = {name: params[name] for name in ("embed", "final_norm", "lm_head")}
    save(tmp_path / "stacked", {"params": {**rest, "layers": jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)}})

    def name_map(leaf: str):
        first, _, inside = leaf.partition("/")
        if not first.startswith("layers_"):
            return f"params/{leaf}"
        i = int(first.removeprefix("layers_"))
        return Sources(f"params/layers/{inside}", lambda stacked: stacked[i])

    asked = []
    read_groups = orbax_io.read_groups
    monkeypatch.setattr(orbax_io, "read_groups", lambda path, groups: read_groups(path, asked.append(groups) or groups))
    same(load_orbax(tmp_path / "stacked", CONFIG, name_map), params)
    assert len(asked[0]) == 3 + 6


def without(key):
    return {name: source for name, source in NAMES.items() if name != key}


@pytest.mark.parametrize(
    ("name_map", "message"),
    [
        (None, r"does not hold the decoder's own tree.* net/\S+ float32\[.*Give a name_map from parameters \(embed/"),
        (without("final_norm/scale"), "name_map says nothing of the parameter 'final_norm/scale'"),
        (without("layers_{i}/mlp/down/kernel"), r"of the parameter 'layers_0/mlp/down/kernel' \(and 2 more\)"),
        (NAMES | {"layers_{i}/wings": "net/ln"}, r"has the key 'layers_\{i\}/wings', which is no parameter"),
        (NAMES | {"layers_7/mlp/down/kernel": "net/ln"}, "has the key 'layers_7/mlp/down/kernel', which is no"),
        (NAMES | {"final_norm/scale": "net/lm"}, r"net/lm \(for final_norm/scale \[32\]\) missing.*nobody reads net"),
        (NAMES | {"lm_head/kernel": "net/head"}, r"net/head is \[32, 64\] but lm_head/kernel is \[64, 32\] in this"),
        (
            NAMES | {"lm_head/kernel": Sources("net/head", lambda kernel: kernel[:2])},
            r"'lm_head/kernel', made from 'net/head' \(float32\[32, 64\]\), has the shape \[2, 64\].* needs \[64, 32\]",
        ),
    ],
)  # fmt: skip
def test_a_name_map_that_does_not_fit(name_map, message, theirs):
    with pytest.raises(ValueError, match=message):
        load_orbax(theirs, CONFIG, name_map)


def test_what_nobody_reads_is_an_error_unless_it_is_ignored(params, tmp_path):
    tree = foreign(params)
    tree["net"]["blocks"][1]["q"]["bias"] = jnp.ones(32)
    save(tmp_path / "more", tree)
    with pytest.raises(ValueError, match=r"net/blocks/1/q/bias float32\[32\] has no place.* ignore="):
        load_orbax(tmp_path / "more", CONFIG, NAMES)
    same(load_orbax(tmp_path / "more", CONFIG, NAMES, ignore=["net/blocks/*/bias"]), params)


def test_a_training_run_of_another_size_names_both_shapes(state, tmp_path):
    save(tmp_path / "state", state)
    wide = ModelConfig(64, 32, 50, 3, 4, 2)
    with pytest.raises(ValueError, match=r"params/layers_0/mlp/down/kernel is \[32, 48\] but \S+ is \[32, 50\]"):
        load_orbax(tmp_path / "state", wide)
    with pytest.raises(ValueError, match=r"params/layers_2/attn/out/kernel float32\[.*has no place"):
        load_orbax(tmp_path / "state", ModelConfig(64, 32, 48, 2, 4, 2))


def test_dtype_is_that_of_most_values_or_as_asked(params, tmp_path):
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params) | {"final_norm": params["final_norm"]}
    save(tmp_path / "half", {"params": half})
    for dtype, expected in ((None, jnp.bfloat16), ("float32", jnp.float32)):
        loaded = load_orbax(tmp_path / "half", CONFIG, dtype=dtype)
        same(loaded, jax.tree.map(lambda leaf, kind=expected: leaf.astype(kind), half))
        assert {leaf.dtype for leaf in jax.tree.leaves(loaded)} == {np.dtype(expected)}
    with pytest.raises(ValueError, match="dtype='float64' must be one of"):
        load_orbax(tmp_path / "half", CONFIG, dtype="float64")


def test_what_is_no_checkpoint(tmp_path):
    with pytest.raises(ValueError, match="is not a directory"):
        load_orbax(tmp_path / "nothing", CONFIG)
    with pytest.raises(ValueError, match="is no finished Orbax checkpoint"):
        load_orbax(tmp_path, CONFIG)


def test_sources():
    with pytest.raises(ValueError, match="needs a transform that joins them"):
        Sources(("a", "b"))
    with pytest.raises(ValueError, match="must be one path or several"):
        Sources(())
    with pytest.raises(TypeError, match="name_map gives 3 for 'x'; it must be a path or"):
        resolve_names(lambda leaf: 3, ["x"])
    exact = resolve_names(
        {"layers_{i}/a": "b{i}", "layers_1/a": "special"}, ["layers_0/a", "layers_1/a", "layers_12/a"]
    )
    assert {leaf: source.paths for leaf, source in exact.items()} == {
        "layers_0/a": ("b0",),
        "layers_1/a": ("special",),
        "layers_12/a": ("b12",),
    }
