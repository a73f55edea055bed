"""The command `adp-kv`: doctor, size, bench, inspect.

Exit status: 0; 1 if the doctor found something that must be mended; 2 for wrong arguments or
what stopped a command, with one line on stderr.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence

from adp_kv import __version__
from adp_kv.cli import bench, doctor, size
from adp_kv.cli import inspect as inspection
from adp_kv.cli.arguments import address, byte_count, count, seconds
from adp_kv.cli.model_config import read_config
from adp_kv.cli.shapes import model_shape
from adp_kv.cli.show import show_facts, show_json, show_rows
from adp_kv.errors import AdpError, ConfigError
from adp_kv.sdk.stats import ask_stored
from adp_kv.units import GiB, KiB, format_bytes
from adp_kv.wire.messages import DEFAULT_PORT

_GATEWAY = f"tcp://127.0.0.1:{DEFAULT_PORT}"
_MARKS = {"ok": "ok  ", "warn": "WARN", "fail": "FAIL", "absent": "-   "}


def _doctor(args: argparse.Namespace) -> int:
    subject = doctor.Subject(args.shared_memory_size, args.gateway or "", args.key_file)
    findings = doctor.examine(subject)
    failed = any(finding.status == "fail" for finding in findings)
    if args.json:
        fields = ("name", "status", "found", "fix")
        show_json([{name: getattr(f, name) for name in fields} for f in findings])
        return int(failed)
    for finding in findings:
        show_rows([(_MARKS[finding.status], finding.name.ljust(15), finding.found)])
        if finding.fix:
            show_rows([("    ", " " * 15, f"fix: {finding.fix}")])
    return int(failed)


def _size(args: argparse.Namespace) -> int:
    shape = model_shape(read_config(args.model), args.kv_dtype, args.tp, args.dtype, args.dcp)
    load = size.Load(
        block_tokens=args.block_size,
        chunk_tokens=args.chunk_size,
        shared_memory_size=args.shared_memory_size,
        fragment_size=args.fragment_size,
        slot_bytes=args.slot_bytes or size.slot_bytes_for(args.fragment_size),
        users=args.users,
        tokens=args.tokens,
        longest=args.longest or args.tokens,
        batched_tokens=args.batched_tokens,
    )
    found = size.sizes(shape, load)
    facts = size.as_facts(found)
    told = {k: _readable(k, v) for k, v in facts.items() if v != "" and k != "caches"}
    for cache in found.caches:
        told[f"{cache.kind}:"] = (
            f"{cache.layers} layers, objects of {_readable('object_bytes', cache.object_bytes)} in "
            f"{cache.fragments} fragments, {cache.objects_per_prompt} a conversation; of a rank "
            f"{_readable('slice_bytes', cache.slice_bytes)}"
        )
    _show(args, facts, readable=told)
    return 0


def _readable(name: str, value: object) -> object:
    if isinstance(value, int) and ("bytes" in name or name in {"io_size", "shared_memory_size"}):
        return f"{value} ({format_bytes(value)})" if value >= KiB else value
    if isinstance(value, int) and name.endswith("shared_memory_size"):
        return f"{value} ({format_bytes(value)})"
    return value


def _bench(args: argparse.Namespace) -> int:
    result: Mapping[str, object]
    if args.what == "card":
        result = bench.bench_card(args.rest, args.seconds)
    elif args.rest:
        raise ConfigError(f"unknown argument {args.rest[0]}")
    elif args.what == "link":
        result = bench.bench_link()
    else:
        result = bench.bench_scatter(args.page_bytes, args.pages)
    _show(args, result)
    return 0


def _inspect(args: argparse.Namespace) -> int:
    keys = inspection.Keys(
        _hex("--namespace", args.namespace),
        _hex("--root", args.root),
        args.algorithm,
        args.hash_tokens,
        args.chunk_tokens,
    )
    chunks = inspection.keys_of(keys, inspection.read_tokens(args.tokens), args.salt)
    stored = ask_stored(args.gateway, chunks, args.timeout, args.key_file).tolist()
    found = inspection.as_result(chunks, stored, args.chunk_tokens)
    readable = {k: v for k, v in found.items() if k != "by_chunk"}
    _show(args, found, readable=readable)
    if not args.json:
        rows = found["by_chunk"]
        assert isinstance(rows, list)  # noqa: S101  our own
        show_rows([("token", "key", "stored")])
        show_rows([(row["first_token"], row["key"], row["stored"]) for row in rows])
    return 0


def _hex(name: str, text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError as error:
        raise ConfigError(f"{name} {text}: not hex; the engine logs it") from error


def _show(
    args: argparse.Namespace,
    result: Mapping[str, object],
    readable: Mapping[str, object] | None = None,
) -> None:
    if args.json:
        show_json(dict(result))
    else:
        show_facts(_flat(result if readable is None else readable))


def _flat(result: Mapping[str, object]) -> dict[str, object]:
    flat: dict[str, object] = {}
    for name, value in result.items():
        if isinstance(value, dict):
            flat |= {f"{name} {inner}": told for inner, told in value.items()}
        else:
            flat[name] = value
    return flat


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="adp-kv", description="Size, check, measure and look into an adp-kv deployment."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(
        name: str, run: Callable[[argparse.Namespace], int], told: str
    ) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=told, description=told)
        sub.add_argument("--json", action="store_true", help="the result as JSON")
        sub.set_defaults(run=run)
        return sub

    sub = command("doctor", _doctor, "check this machine; each line says what to do")
    sub.add_argument("--shared-memory-size", type=byte_count, default=6 * GiB, metavar="BYTES")
    sub.add_argument("--gateway", type=address, metavar="ADDRESS", help="also ask this gateway")
    sub.add_argument("--key-file", default="", metavar="FILE", help="of that gateway")
    _add_size(command("size", _size, "ring and card for a model, from its config.json"))
    sub = command("bench", _bench, "measure link, scatter or card on this machine")
    sub.add_argument("what", choices=("link", "scatter", "card"))
    sub.add_argument("--seconds", type=seconds, default=5.0, help="card: of each phase")
    sub.add_argument("--page-bytes", type=byte_count, default=32 * KiB, help="scatter")
    sub.add_argument("--pages", type=count(1), default=16, help="scatter: pages of a slice")
    sub = command("inspect", _inspect, "which chunks of a prompt are on the card")
    sub.add_argument("--gateway", type=address, default=_GATEWAY, metavar="ADDRESS")
    sub.add_argument("--key-file", default="", metavar="FILE", help="of that gateway")
    for name in ("namespace", "root", "algorithm"):
        sub.add_argument(f"--{name}", required=True, help="as the engine logs it")
    for name in ("hash-tokens", "chunk-tokens"):
        sub.add_argument(f"--{name}", type=count(1), required=True, help="as the engine logs it")
    sub.add_argument("--tokens", required=True, help="token ids, or @FILE with token ids")
    sub.add_argument("--salt", help="the request's cache_salt")
    sub.add_argument("--timeout", type=seconds, default=5.0, metavar="SECONDS")
    return parser


def _add_size(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("model", help="config.json, its folder, or a name in the Hugging Face cache")
    sub.add_argument("--tp", type=count(1), default=1, help="tensor-parallel ranks")
    sub.add_argument(
        "--dcp", type=count(1), default=1, help="vLLM's --decode-context-parallel-size"
    )
    sub.add_argument("--dtype", default="auto", help="as vLLM's")
    sub.add_argument("--kv-dtype", default="auto", help="as vLLM's --kv-cache-dtype")
    sub.add_argument(
        "--block-size",
        type=count(1),
        default=16,
        help="of vLLM; with recurrent layers the least it may be",
    )
    sub.add_argument("--chunk-size", type=count(0), default=0, help="of the connector")
    sub.add_argument("--shared-memory-size", type=byte_count, default=6 * GiB, metavar="BYTES")
    sub.add_argument(
        "--fragment-size",
        type=byte_count,
        default=256 * KiB,
        metavar="BYTES",
        help="longest value on the card; of the slab card by default",
    )
    sub.add_argument("--slot-bytes", type=byte_count, default=0, metavar="BYTES", help="slab card")
    sub.add_argument("--users", type=count(1), default=100, help="conversations to keep")
    sub.add_argument("--tokens", type=count(1), default=16384, help="tokens of each")
    sub.add_argument(
        "--longest", type=count(0), default=0, help="longest prompt; default: --tokens"
    )
    sub.add_argument(
        "--batched-tokens", type=count(1), default=8192, help="vLLM's --max-num-batched-tokens"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return the exit status."""
    parser = _parser()
    args, rest = parser.parse_known_args(arguments)
    if rest and args.run is not _bench:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    args.rest = rest
    try:
        run: Callable[[argparse.Namespace], int] = args.run
        return run(args)
    except AdpError as error:
        sys.stderr.write(f"adp-kv: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
