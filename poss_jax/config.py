"""Frozen, hashable descriptions of a target and of a drafter, from Hugging Face config dictionaries."""

import dataclasses
import math
import numbers
from collections.abc import Mapping
from typing import Any

from poss_jax.errors import InputError

ROPE_KINDS = ("default", "linear", "dynamic", "llama3")
FACTORS = "rope_frequency_factors"  # a field that only we know
EXPERT_FIELDS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding. `kind` is one of `ROPE_KINDS`; `factor` and what follows serve the scaled kinds.

    `max_position` is the length from which `dynamic` stretches; for `llama3` it is the length of the original
    training. `frequency_factors` [head_dim / 2] divide the inverse frequencies one by one (GGUF files hold
    llama3 scaling in that form); empty means none.
    """

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    max_position: int = 2048
    frequency_factors: tuple[float, ...] = ()

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "RopeConfig":
        """Reads the old style (`rope_theta`, `rope_scaling`) and the one of transformers 5 (`rope_parameters`).

        Raises InputError for a rotary type that is not one of `ROPE_KINDS`, for partial rotation, and for layers that
        rotate differently.
        """
        parameters, scaling = _mapping(config, "rope_parameters"), _mapping(config, "rope_scaling")
        scaling = {**parameters, **scaling}
        for layers, value in scaling.items():
            if isinstance(value, Mapping):  # transformers 5, where layers of one kind rotate otherwise than others
                raise InputError(f"layers of type {layers!r} have a rotation of their own, which is not supported")
        kind = scaling.get("rope_type") or scaling.get("type") or "default"
        if kind not in ROPE_KINDS:
            raise InputError(f"rotary type {kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}")
        partial = scaling.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
        if partial != 1.0:
            raise InputError(f"partial_rotary_factor {partial} is not supported; only 1.0 is")
        theta = _real({"rope_theta": scaling.get("rope_theta", config.get("rope_theta")) or 10000.0}, "rope_theta")
        max_position = _whole(config, "max_position_embeddings", 2048)
        extra: dict[str, Any] = {}
        where = f"{kind} rotary scaling"
        if kind != "default":
            extra["factor"] = _real(scaling, "factor", where=where)
        if kind == "llama3":
            extra["low_frequency_factor"] = _real(scaling, "low_freq_factor", where=where)
            extra["high_frequency_factor"] = _real(scaling, "high_freq_factor", where=where)
            max_position = _whole(scaling, "original_max_position_embeddings", max_position, where=where)
        factors = tuple(_real({"rope_frequency_factors": f}, "rope_frequency_factors") for f in _list(config, FACTORS))
        return cls(kind=kind, theta=theta, max_position=max_position, frequency_factors=factors, **extra)

    def to_hf(self) -> dict[str, Any]:
        """Fields that `from_hf` and transformers read back to this; written old-style, which readers of any age know.

        Only `from_hf` knows `rope_frequency_factors`, which is written where there are any.
        """
        fields: dict[str, Any] = {"rope_theta": self.theta, "rope_scaling": None}
        fields["max_position_embeddings"] = self.max_position
        if self.kind != "default":  # `type` is what the oldest readers look for
            fields["rope_scaling"] = {"type": self.kind, "rope_type": self.kind, "factor": self.factor}
        if self.kind == "llama3":
            fields["rope_scaling"] |= {
                "low_freq_factor": self.low_frequency_factor,
                "high_freq_factor": self.high_frequency_factor,
                "original_max_position_embeddings": self.max_position,
            }
            fields["max_position_embeddings"] = math.ceil(self.max_position * self.factor)
        if self.frequency_factors:
            fields[FACTORS] = list(self.frequency_factors)
        return fields


@dataclasses.dataclass(frozen=True)
class BlockConfig:
    """Sizes of one transformer block, shared by the target's layers and the drafter's specialists."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeConfig

    @property
    def queries_per_kv(self) -> int:
        """g: query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "BlockConfig":
        """Raises InputError for a missing or impossible size, naming it."""
        heads, hidden = _whole(config, "num_attention_heads"), _whole(config, "hidden_size")
        kv_heads = _whole(config, "num_key_value_heads", heads, absent=(None,))
        head_dim = _whole(config, "head_dim", hidden // heads, absent=(None,))
        if heads % kv_heads:
            raise InputError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
        if head_dim % 2 or not head_dim:
            what = "odd" if head_dim else "no size"
            raise InputError(f"head_dim {head_dim} is {what}; rotary embeddings need an even one")
        rope = RopeConfig.from_hf(config)
        factors = len(rope.frequency_factors)
        if factors not in (0, head_dim // 2):
            raise InputError(f"{FACTORS} has {factors} numbers; head_dim {head_dim} needs {head_dim // 2}")
        activation = config.get("hidden_act", "silu")
        if activation != "silu":
            raise InputError(f"hidden_act {activation!r} is not supported; only 'silu' is")
        return cls(
            hidden_size=hidden,
            intermediate_size=_whole(config, "intermediate_size"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            norm_eps=_real(config, "rms_norm_eps", 1e-6),
            rope=rope,
        )

    def to_hf(self) -> dict[str, Any]:
        """The fields that `from_hf` reads back to this."""
        return {
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.norm_eps,
            **self.rope.to_hf(),
        }


@dataclasses.dataclass(frozen=True)
class Family:
    """What sets the models of one `model_type` apart. Biases: whether there are any, or the config field that says so.

    windows: whether some layers may see only so many rows back: never (""), "all" layers where the config has a
    `sliding_window`, or the "upper" ones where it also has `use_sliding_window`. defaults: what transformers takes for
    fields that a config leaves out, where that is not what it takes for Llama.
    """

    query_key_value_bias: bool | str = False
    attention_output_bias: bool | str = False
    mlp_bias: bool | str = False
    query_key_norm: bool = False
    windows: str = ""
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)


QWEN_DEFAULTS = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
FAMILIES = {
    "llama": Family("attention_bias", "attention_bias", "mlp_bias"),
    "mistral": Family(
        windows="all",
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    ),
    "phi3": Family(windows="all", defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5}),
    "qwen2": Family(query_key_value_bias=True, windows="upper", defaults=QWEN_DEFAULTS),
    "qwen3": Family(
        "attention_bias",
        "attention_bias",
        query_key_norm=True,
        windows="upper",
        defaults={**QWEN_DEFAULTS, "head_dim": 128},
    ),
}


@dataclasses.dataclass(frozen=True)
class TargetConfig:
    """A Llama-type target. `context` is the most tokens (prompt and new ones) that it was made for.

    family: its `model_type`, one of `FAMILIES`. window: how many rows its narrowest layer sees, itself included, or
    None; `context` is never more than that, so that every row within it sees all before it.
    """

    block: BlockConfig
    vocab_size: int
    num_layers: int
    context: int
    tie_embeddings: bool = False
    query_key_value_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    query_key_norm: bool = False
    family: str = "llama"
    window: int | None = None

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "TargetConfig":
        """From the contents of a `config.json`.

        Raises InputError, naming the field, for anything that would need another computation than ours.
        """
        kind = config.get("model_type", "llama")
        _refuse_experts(config)
        if not isinstance(kind, str) or kind not in FAMILIES:
            raise InputError(f"model_type {kind!r} is not supported; supported: {', '.join(FAMILIES)}")
        _refuse_quantised(config)
        family = FAMILIES[kind]
        config = {**family.defaults, **config}
        block, layers = BlockConfig.from_hf(config), _whole(config, "num_hidden_layers")
        context, window = _whole(config, "max_position_embeddings", 2048), _window(config, family.windows, layers)
        if block.rope.kind in ("linear", "dynamic"):  # taken as the length before stretching, as vLLM does
            context = int(context * block.rope.factor)
        return cls(
            block=block,
            vocab_size=_whole(config, "vocab_size"),
            num_layers=layers,
            context=context if window is None else min(context, window),
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            query_key_value_bias=_flag(config, family.query_key_value_bias),
            attention_output_bias=_flag(config, family.attention_output_bias),
            mlp_bias=_flag(config, family.mlp_bias),
            query_key_norm=family.query_key_norm,
            family=kind,
            window=window,
        )


def _refuse_experts(config: Mapping[str, Any]) -> None:
    for name in EXPERT_FIELDS:
        if config.get(name):
            raise InputError(f"mixtures of experts are not supported, and the config has {name} {config[name]!r}")


def _refuse_quantised(config: Mapping[str, Any]) -> None:
    if config.get("quantization_config"):
        method = _mapping(config, "quantization_config").get("quant_method", "unknown")
        raise InputError(f"weights quantised with {method!r} are not supported; use the unquantised checkpoint")


def _flag(config: Mapping[str, Any], says: bool | str) -> bool:
    return bool(config.get(says, False)) if isinstance(says, str) else says


def _window(config: Mapping[str, Any], layers_with_windows: str, layers: int) -> int | None:
    """See `Family.windows`."""
    if not layers_with_windows or config.get("sliding_window") is None:
        return None
    if layers_with_windows == "upper":
        full = config.get("max_window_layers") or 0
        kinds = _list(config, "layer_types")
        if not isinstance(full, int):
            raise InputError(f"the config has max_window_layers {full!r}, expected a whole number")
        if not config.get("use_sliding_window") or not ("sliding_attention" in kinds if kinds else layers > full):
            return None
    return _whole(config, "sliding_window")


@dataclasses.dataclass(frozen=True)
class DraftConfig:
    """A drafter: one block per span. `spans[s]` is how many draft positions specialist s was trained for.

    Example: spans (3, 3) is PosS-3 of the paper (arXiv 2506.03566): positions 0-2 use specialist 0, positions
    3-5 and all beyond use specialist 1. (1,) is EAGLE, (6,) is HASS with six aligned steps.
    """

    block: BlockConfig
    vocab_size: int
    spans: tuple[int, ...]
    fc_bias: bool = True
    query_key_value_bias: bool = False

    def __post_init__(self):
        if not self.spans or not all(isinstance(span, numbers.Integral) and span >= 1 for span in self.spans):
            raise InputError(f"spans {format_spans(self.spans)!r} must be whole numbers of at least 1")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], spans: tuple[int, ...]) -> "DraftConfig":
        """From a published draft `config.json`, whose `bias` (true if absent) is the bias of `fc`, and whose `qkv_bias`
        (false if absent) are those of queries, keys and values, which drafters of Qwen2 have.
        """
        _refuse_quantised(config)
        return cls(
            block=BlockConfig.from_hf(config),
            vocab_size=_whole(config, "vocab_size"),
            spans=tuple(spans),
            fc_bias=bool(config.get("bias", True)),
            query_key_value_bias=bool(config.get("qkv_bias", False)),
        )

    def to_hf(self) -> dict[str, Any]:
        """The contents of a published draft `config.json`, with the spans.

        `from_hf` reads it back to this. Other readers know neither the spans nor that there is a layer for each:
        published drafters say one layer, however many specialists there are.
        """
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "num_hidden_layers": 1,
            **self.block.to_hf(),
            "bias": self.fc_bias,
            **({"qkv_bias": True} if self.query_key_value_bias else {}),
            "spans": list(self.spans),
        }

    @property
    def starts(self) -> tuple[int, ...]:
        """First draft position of each specialist; (3, 3) gives (0, 3)."""
        return tuple(sum(self.spans[:index]) for index in range(len(self.spans)))

    def specialist_at(self, position: int) -> int:
        """Index of the specialist for a draft position; past the last span it is the last one."""
        return max(index for index, start in enumerate(self.starts) if start <= position)

    def specialists_used(self, levels: int) -> int:
        """How many of the specialists a tree of `levels` levels runs; the others need no cache."""
        return self.specialist_at(levels - 1) + 1 if levels else 0


def parse_spans(text: str) -> tuple[int, ...]:
    """ "3,3" gives (3, 3). Raises InputError for anything but whole numbers of at least 1."""
    try:
        spans = tuple(int(part) for part in text.split(","))
    except ValueError:
        spans = ()
    if not spans or any(span < 1 for span in spans):
        raise InputError(f"spans {text[:80]!r} must be whole numbers of at least 1, such as 3,3")
    return spans


def format_spans(spans: tuple[int, ...]) -> str:
    """(3, 3) gives "3,3"."""
    return ",".join(str(span) for span in spans)


_MISSING = object()


def _number(config: Mapping[str, Any], name: str, default: Any, where: str, absent: tuple) -> Any:
    value = config.get(name, _MISSING)
    if value is _MISSING or value in absent or (value is None and default is None):
        if default is None:
            raise InputError(f"{where} lacks {name!r}")
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise InputError(f"{where} has {name} {value!r}, expected a positive number")
    return value


def _whole(
    config: Mapping[str, Any], name: str, default: int | None = None, where: str = "the config", absent: tuple = ()
) -> int:
    """A whole number of at least 1. `absent`: values that mean the same as leaving the field out."""
    value = _number(config, name, default, where, absent)
    if value != int(value):
        raise InputError(f"{where} has {name} {value!r}, expected a whole number")
    return int(value)


def _real(config: Mapping[str, Any], name: str, default: float | None = None, where: str = "the config") -> float:
    """A positive number."""
    return float(_number(config, name, default, where, ()))


def _mapping(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """An object; {} where the field is absent or null."""
    value = config.get(name) or {}
    if not isinstance(value, Mapping):
        raise InputError(f"the config has {name} {value!r}, expected an object")
    return value


def _list(config: Mapping[str, Any], name: str) -> list:
    """A list; [] where the field is absent or null."""
    value = config.get(name) or []
    if not isinstance(value, list):
        raise InputError(f"the config has {name} {value!r}, expected a list")
    return value
