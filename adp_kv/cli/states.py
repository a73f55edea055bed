"""Bytes of a recurrent layer's state, from a model's config.json.

    Mamba-2            convolution over x, B and C, and a state [heads, head_dim, state_size]
    gated delta net    convolution over q, k and v, and a state [value heads, value, key dim]
    short convolution  the convolution alone

What is kept is what vLLM keeps of one sequence in one layer (its mamba_utils); a test compares
with vLLM's own calculators. Kinds that are not here are an error, not a guess.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from adp_kv.cli.model_config import Config, family, item_bytes, number
from adp_kv.errors import ConfigError


@dataclass(frozen=True, slots=True)
class _Mamba2Names:
    """What a family calls the numbers of Mamba-2; "" for head_dim: inner size / heads."""

    heads: str
    head_dim: str
    groups: str
    state: str
    kernel: str


_MAMBA2: Final = {
    "granitemoehybrid": _Mamba2Names(
        "mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv"
    ),
    "falcon_h1": _Mamba2Names(
        "mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv"
    ),
    "nemotron_h": _Mamba2Names(
        "mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel"
    ),
    "zamba2": _Mamba2Names("n_mamba_heads", "", "mamba_ngroups", "mamba_d_state", "mamba_d_conv"),
}


@dataclass(frozen=True, slots=True)
class State:
    """One layer's state, all ranks together.

    Attributes:
        kind: what it is, for people.
        conv_items, ssm_items: of the convolution and of the state.
        ssm_dtype: of the state's items where the model says so; the convolution's are the model's.
    """

    kind: str
    conv_items: int
    ssm_items: int
    ssm_dtype: str

    def num_bytes(self, dtype: str) -> int:
        """Return its bytes where the model runs in a type."""
        conv = item_bytes(dtype, "--dtype")
        ssm = item_bytes(self.ssm_dtype or dtype, "the state's type")
        return self.conv_items * conv + self.ssm_items * ssm


def state_of(config: Config, tp_size: int) -> State:
    """Return what a recurrent layer of this model keeps.

    Raises:
        ConfigError: A family whose states this can't size, a number that is missing, or ranks
            that vLLM can't divide it among.
    """
    name = family(config)
    if name in _MAMBA2:
        state = _mamba2(config, _MAMBA2[name], tp_size)
    elif name.startswith(("qwen3_next", "qwen3_5")):
        state = _gated_delta_net(config, tp_size)
    elif name.startswith("lfm2"):
        dim = _divided(config, "conv_dim", tp_size)
        items = dim * (number(config, "conv_L_cache") - 1)
        state = State("short convolution", items, 0, "")
    else:
        known = ", ".join([*_MAMBA2, "qwen3_next", "qwen3_5", "lfm2"])
        raise ConfigError(
            f"recurrent layers of model_type {name or 'unknown'}: their states can't be sized from "
            f"config.json (known are {known}); the gateway logs io_size when the engine joins"
        )
    return state


def _mamba2(config: Config, names: _Mamba2Names, tp_size: int) -> State:
    heads = _divided(config, names.heads, tp_size)
    inner = _inner_size(config, names)
    head_dim = config.get(names.head_dim) if names.head_dim else None
    head_dim = head_dim if isinstance(head_dim, int) else inner // heads  # absent or "auto"
    groups, state = number(config, names.groups), number(config, names.state)
    if groups % tp_size:
        if groups > 1:
            raise ConfigError(f"--tp {tp_size}: {names.groups} = {groups} is no multiple of it")
        groups = tp_size  # each rank has the only one
    conv = (inner + 2 * groups * state) * (number(config, names.kernel) - 1)
    ssm_dtype = ""
    if family(config) == "nemotron_h":
        ssm_dtype = str(config.get("mamba_ssm_cache_dtype") or "float32")
    return State("Mamba-2", conv, heads * head_dim * state, ssm_dtype)


def _inner_size(config: Config, names: _Mamba2Names) -> int:
    if family(config) == "nemotron_h":
        return number(config, names.heads) * number(config, names.head_dim)
    given = config.get("mamba_d_ssm") if family(config) == "falcon_h1" else None
    if isinstance(given, int):
        return given
    expand = config.get("mamba_expand")
    if not isinstance(expand, int | float):
        raise ConfigError("config.json has no mamba_expand")
    return int(expand * number(config, "hidden_size"))


def _gated_delta_net(config: Config, tp_size: int) -> State:
    keys = _divided(config, "linear_num_key_heads", tp_size)
    values = _divided(config, "linear_num_value_heads", tp_size)
    key_dim, value_dim = (number(config, f"linear_{k}_head_dim") for k in ("key", "value"))
    conv = (2 * keys * key_dim + values * value_dim) * (
        number(config, "linear_conv_kernel_dim") - 1
    )
    ssm_dtype = ""
    if family(config).startswith("qwen3_5"):
        ssm_dtype = str(config.get("mamba_ssm_dtype") or "")
    return State("gated delta net", conv, values * value_dim * key_dim, ssm_dtype)


def _divided(config: Config, name: str, tp_size: int) -> int:
    value = number(config, name)
    if value % tp_size:
        raise ConfigError(f"--tp {tp_size}: {name} = {value} is no multiple of it")
    return value
