"""speculative_config, speculative_model and num_speculative_tokens: what is asked for, checked. Imports no JAX."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, get_args

from jaxinfer.config import TypicalAcceptance, require_positive

if TYPE_CHECKING:
    from jaxinfer.speculation.candidate_tree import Choices
    from jaxinfer.speculation.lookahead import LookaheadShape

SpeculationMethod = Literal["ngram", "lookahead", "draft_model", "medusa", "eagle", "eagle3"]
METHODS: tuple[SpeculationMethod, ...] = get_args(SpeculationMethod)
_UNBUILT_METHODS = ("mtp", "suffix", "mlp_speculator", "deepseek_mtp")
_NGRAM_NAMES = ("ngram", "[ngram]")
DEFAULT_TOKENS = 5
AUTO_TOKENS = 7
"""Most tokens of an "auto" draft: with the known one they make a step of 8, the smallest size above one."""


@dataclass(frozen=True)
class SpeculativeOptions:
    """Entries of `speculative_config`.

    Args:
        method: "ngram", "lookahead", "draft_model", "medusa", "eagle" (heads of versions 1 and 2) or "eagle3"; where it
            is None, "draft_model" if `model` is given.
        model: the draft model: folder, GGUF file, Hub id or built-in name. "ngram" here means the method, as in vLLM.
            Of "medusa" and "eagle": the folder (or Hub id) of the heads.
        num_speculative_tokens: tokens guessed for a request in a step, at most, in a tree all its nodes; "auto" adapts
            their number to what was right so far, up to 7. Where it is None: the nodes of `medusa_choices`, or 5.
        prompt_lookup_max: of "ngram": tokens at the end that are looked for in what came before, at most.
        prompt_lookup_min: of "ngram": at least so many of them have to have occurred.
        window_size: of "lookahead": W, columns that are computed ahead; 4.
        ngram_size: of "lookahead": N, tokens of an n-gram; 5. N - 1 of them are guessed.
        guess_set_size: of "lookahead": G, n-grams that are kept for each first token, and verified in a step; 4.
        pool_from_prompt: of "lookahead": whether the n-grams of prompt and output are known as well; True.
        disable_by_batch_size: with more running requests than this nothing is guessed. Where it is None: as many as
            keep a step that verifies at 64 tokens on a CPU and at 256 elsewhere.
        quantization: how the draft model's weights are stored, as the engine's option of that name.
        quantization_config: its options.
        revision: branch, tag or commit of a draft model on the Hub.
        params: live parameters of a draft model or of heads, in place of `model`.
        model_config: the architecture of a draft model given so.
        medusa_choices: of "medusa": a tree of a fixed shape, as the paths of its nodes: [[0], [1], [0, 0]] is the first
            and second guess of the first head, and the first of the second head behind the former. Where it is None,
            each tree has the nodes with the highest products of probability.
        acceptance: of "medusa": "exact" changes no output. "typical" is LOSSY: random requests, seeded or not, keep
            guesses that are typical of what the model might say (arXiv:2401.10774, section 2.3.2), so that their
            outputs depend on the guesses and do not follow the model's distribution; greedy ones stay exact.
        posterior_threshold: of "typical": guesses above this probability are kept (0.09),
        posterior_alpha: or above this share of ``exp(-entropy)`` of the distribution, if that is less (0.3).
        eagle_topk: of "eagle" and "eagle3": nodes of each depth that go on growing, and children of each; 1, which is
            the default, makes chains. From 2 on drafts are the best `num_speculative_tokens` nodes of dynamic trees.
        eagle_depth: tokens ahead. Where it is None: `num_speculative_tokens`, in trees at most 5.
        draft_vocab: of "eagle": tokens that it guesses among, as ids, as a JSON file with a list of ids, or as how many
            of the first ids; all where it is None. Few make a small output head.
        draft_tensor_parallel_size: 1.
    """

    method: SpeculationMethod | None = None
    model: str | Path | None = None
    num_speculative_tokens: int | str | None = None
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None
    window_size: int | None = None
    ngram_size: int | None = None
    guess_set_size: int | None = None
    pool_from_prompt: bool | None = None
    disable_by_batch_size: int | None = None
    quantization: str | None = None
    quantization_config: Mapping[str, Any] | None = None
    revision: str | None = None
    params: Any = None
    model_config: Any = None
    medusa_choices: Sequence[Sequence[int]] | None = None
    acceptance: str = "exact"
    posterior_threshold: float | None = None
    posterior_alpha: float | None = None
    eagle_topk: int | None = None
    eagle_depth: int | None = None
    draft_vocab: int | str | Path | Sequence[int] | None = None
    draft_tensor_parallel_size: int = 1

    @property
    def typical(self) -> TypicalAcceptance | None:
        """The lossy rule that was asked for."""
        if self.acceptance == "exact":
            return None
        defaults = TypicalAcceptance()
        threshold, alpha = self.posterior_threshold, self.posterior_alpha
        return TypicalAcceptance(
            defaults.posterior_threshold if threshold is None else threshold,
            defaults.posterior_alpha if alpha is None else alpha,
        )

    @property
    def max_tokens(self) -> int:
        """Tokens of a draft, at most."""
        if self.method == "lookahead":
            return self.lookahead.tokens
        tokens = self.num_speculative_tokens
        if tokens is None:
            return DEFAULT_TOKENS if self.choices is None else len(self.choices)
        return tokens if isinstance(tokens, int) else AUTO_TOKENS

    @property
    def choices(self) -> "Choices | None":
        """`medusa_choices`, checked."""
        if self.medusa_choices is None:
            return None
        from jaxinfer.speculation.candidate_tree import check_choices  # command lines start without NumPy

        return check_choices(self.medusa_choices)

    @property
    def lookahead(self) -> "LookaheadShape":
        """The shape of "lookahead"."""
        from jaxinfer.speculation.lookahead import LookaheadShape

        sizes = (self.window_size, self.ngram_size, self.guess_set_size)
        given = zip(sizes, DEFAULT_LOOKAHEAD, strict=True)
        return LookaheadShape(*(default if size is None else size for size, default in given))

    @property
    def lookup(self) -> tuple[int, int]:
        """Shortest and longest match of "ngram"."""
        longest = self.prompt_lookup_max or max(DEFAULT_LOOKUP[1], self.prompt_lookup_min or 0)
        return self.prompt_lookup_min or min(DEFAULT_LOOKUP[0], longest), longest


DEFAULT_LOOKUP = (2, 5)
DEFAULT_LOOKAHEAD = (4, 5, 4)
"""W, N and G: with the known token they make a step of 32."""


def speculative_options(
    config: Mapping[str, Any] | None, model: str | Path | None, num_tokens: int | str | None
) -> SpeculativeOptions | None:
    """What the three arguments ask for; None for no speculation.

    Args:
        config: `speculative_config`.
        model: `speculative_model`, short for {"model": ...}.
        num_tokens: `num_speculative_tokens`, short for {"num_speculative_tokens": ...}.

    Raises:
        ValueError: an unknown entry, a method that is not built, values that contradict each other or are out of range.
        TypeError: a value of the wrong type.
    """
    if config is not None and not isinstance(config, Mapping):
        raise TypeError(f"speculative_config={config!r} must be a mapping")
    values = dict(config or {})
    for name, value in (("model", model), ("num_speculative_tokens", num_tokens)):
        if value is not None and values.setdefault(name, value) != value:
            raise ValueError(f"speculative_config has {name}={values[name]!r} and the argument is {value!r}; give one")
    known = [item.name for item in fields(SpeculativeOptions)]
    for name in values:
        if name not in known:
            raise ValueError(f"speculative_config holds {name!r}; the entries are {', '.join(known)}")
    if not values:
        return None
    options = _with_method(SpeculativeOptions(**values))
    _check_numbers(options)
    _check_uses(options)
    return options


def _with_method(options: SpeculativeOptions) -> SpeculativeOptions:
    method, model = options.method, options.model
    if model is not None and not isinstance(model, str | Path):
        raise TypeError(f"speculative model={model!r} must be a path, a Hub id or a built-in name")
    if model in _NGRAM_NAMES:
        if method not in (None, "ngram"):
            raise ValueError(f"method={method!r} contradicts model={model!r}; give the draft's model, or leave it out")
        method, model = "ngram", None
    if method is None and (model is not None or options.params is not None):
        method = "draft_model"
    if method in _UNBUILT_METHODS:
        raise ValueError(f"speculative method={method!r} is not built yet; use one of {', '.join(METHODS)}")
    if method not in METHODS:
        raise ValueError(
            f"speculative method={method!r} must be one of {', '.join(METHODS)}"
            + ("; a draft model is named with model (speculative_model)" if method is None else "")
        )
    return replace(options, method=method, model=model)


def _check_numbers(options: SpeculativeOptions) -> None:
    tokens = options.num_speculative_tokens
    if isinstance(tokens, str) and tokens != "auto":
        raise ValueError(f"num_speculative_tokens={tokens!r} must be an int of at least 1, or 'auto'")
    if tokens not in ("auto", None):
        require_positive("num_speculative_tokens", tokens)
    for name in ("prompt_lookup_max", "prompt_lookup_min", "disable_by_batch_size", "eagle_topk", "eagle_depth"):
        if getattr(options, name) is not None:
            require_positive(name, getattr(options, name))
    if options.pool_from_prompt is not None and not isinstance(options.pool_from_prompt, bool):
        raise TypeError(f"pool_from_prompt={options.pool_from_prompt!r} must be True or False")
    shortest, longest = options.lookup
    if shortest > longest:
        raise ValueError(f"prompt_lookup_min={shortest} exceeds prompt_lookup_max={longest}; lower it")
    if options.draft_tensor_parallel_size != 1:
        raise ValueError(
            f"draft_tensor_parallel_size={options.draft_tensor_parallel_size!r} is not supported: the draft's model "
            "lies where the target does, by tensor_parallel_size. Leave it out (or give 1)."
        )


_USED_BY: Mapping[str, tuple[SpeculationMethod, ...]] = MappingProxyType(
    {
        "model": ("draft_model", "medusa", "eagle", "eagle3"),
        "revision": ("draft_model", "medusa", "eagle", "eagle3"),
        "params": ("draft_model", "medusa"),
        "model_config": ("draft_model",),
        "quantization": ("draft_model",),
        "quantization_config": ("draft_model",),
        "prompt_lookup_max": ("ngram",),
        "prompt_lookup_min": ("ngram",),
        "window_size": ("lookahead",),
        "ngram_size": ("lookahead",),
        "guess_set_size": ("lookahead",),
        "pool_from_prompt": ("lookahead",),
        "medusa_choices": ("medusa",),
        "posterior_threshold": ("medusa",),
        "posterior_alpha": ("medusa",),
        "eagle_topk": ("eagle", "eagle3"),
        "eagle_depth": ("eagle", "eagle3"),
        "draft_vocab": ("eagle",),
    }
)
"""Entries that only some methods have."""


def _check_uses(options: SpeculativeOptions) -> None:
    """Entries of other methods are not passed over."""
    for name, methods in _USED_BY.items():
        if options.method not in methods and getattr(options, name) is not None:
            raise ValueError(f"{name} is not of the speculative method {options.method!r}; leave it out")
    if options.method == "medusa" and (options.params is None) == (options.model is None):
        raise ValueError("the speculative method 'medusa' needs the heads: give their folder as model, or params")
    _ = options.choices, options.lookahead
    if options.method == "lookahead" and options.num_speculative_tokens not in (None, options.lookahead.tokens):
        raise ValueError(
            f"num_speculative_tokens={options.num_speculative_tokens!r}: of 'lookahead' it is (window_size + "
            f"guess_set_size) * (ngram_size - 1) - 1 = {options.lookahead.tokens}; change these, and leave it out"
        )
    _check_acceptance(options)
    if options.method in ("eagle", "eagle3") and options.model is None:
        raise ValueError(f"the speculative method {options.method!r} needs the head: give its folder as model")
    if options.method == "draft_model":
        if (options.params is None) == (options.model is None):
            raise ValueError("the speculative method 'draft_model' needs a model, or params with model_config")
        if (options.params is None) != (options.model_config is None):
            raise ValueError("live params of a draft model come with model_config=ModelConfig(...), and only they do")


def _check_acceptance(options: SpeculativeOptions) -> None:
    if options.acceptance not in ("exact", "typical"):
        raise ValueError(f"acceptance={options.acceptance!r} must be 'exact' or 'typical', which is lossy")
    if options.acceptance == "typical" and options.method != "medusa":
        raise ValueError(f"acceptance='typical' is not of the speculative method {options.method!r}; leave it out")
    if options.typical is None and (options.posterior_threshold, options.posterior_alpha) != (None, None):
        raise ValueError("posterior_threshold and posterior_alpha are of acceptance='typical', which is lossy")
