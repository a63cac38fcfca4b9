"""Show and check policies: built-in ones by name, custom ones by the path of a TOML file."""

from __future__ import annotations

import argparse
import itertools
import textwrap
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path

from xla_amp.cli import arguments as common
from xla_amp.common import files, tables
from xla_amp.errors import PolicyError
from xla_amp.policy import BUILTIN, Decision, Policy, load, op_catalog, resolve
from xla_amp.policy.load import read_file, rules_from_file, signature

HELP = "show and check policies"

Answer = tuple[str, int]


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds ``show`` and ``check``."""
    kinds = parser.add_subparsers(metavar="ACTION", required=True)
    known = f"a built-in policy ({', '.join(BUILTIN)}) or the path of a TOML file"
    common.epilog(
        parser,
        {
            "xla-amp policy show tpu --operation softmax": "one decision and its reason",
            "xla-amp policy check rules.toml": "before a run",
        },
        {0: "yes: shown, valid", 1: "no: invalid"},
    )

    show = kinds.add_parser("show", help="the rules in force, or the decision about one operation")
    show.add_argument("name", metavar="POLICY", help=known)
    show.add_argument("--operation", metavar="OP", help="ATen name, e.g. softmax or pow.Tensor_Scalar")
    show.add_argument("--module", metavar="PATH", help="with --operation: inside the module of this path")
    show.add_argument("--json", action="store_true", help="JSON instead of a table")
    show.set_defaults(run=_show)
    common.epilog(
        show,
        {"xla-amp policy show tpu": "every rule", "xla-amp policy show tpu --operation pow": "one decision"},
        {0: "shown"},
    )

    check = kinds.add_parser("check", help="whether a policy file is valid; prints file, line and fix if not")
    check.add_argument("file", metavar="FILE", type=Path, help="a policy, or rows for XLA_AMP_POLICY")
    check.set_defaults(run=_check)
    common.epilog(check, {"xla-amp policy check rules.toml": "before a run"}, {0: "valid", 1: "invalid"})


def _torch_operations() -> Iterable[str]:
    """All operations of torch, for names that are not in the catalogue; imports torch only then."""
    try:
        import torch
    except ImportError:
        return ()
    return torch._C._dispatch_get_all_op_names()


op_catalog.registered_operations.subscribe(_torch_operations)


def _show(arguments: argparse.Namespace) -> Answer:
    policy = resolve(arguments.name)
    if arguments.operation is not None:
        return _decisions(policy, arguments)
    rows = [
        {
            "operations": list(rule.operations),
            "cast": rule.cast,
            "layer": layer.layer,
            "why": rule.why,
            "source": rule.source,
            "note": rule.note,
            "rule": rule.origin,
        }
        for layer in policy.layers
        for rule in layer.rules
    ]
    if arguments.json:
        header = ("name", "low", "jax_low", "dtypes", "summary", "source")
        return common.as_json({**{key: getattr(policy, key) for key in header}, "rules": rows}), 0
    head = f"{policy.name}: low = {policy.named_low}, may be {' or '.join(policy.dtypes)}. {policy.summary}".rstrip()
    width = tables.terminal_width()
    casts = max(len(rule.cast) for rule in policy.rules) + 2
    texts = [textwrap.fill(head, width), "A later row wins over an earlier one of another layer."]
    written = [
        ((rule.cast, rule.why + ("" if layer.layer == "builtin" else f" [{layer.layer}: {rule.origin}]")), rule)
        for layer in policy.layers
        for rule in layer.rules
    ]
    for (cast, why), alike in itertools.groupby(written, key=lambda pair: pair[0]):
        names = ", ".join(name for _, rule in alike for name in rule.operations)
        parts = f"{cast.ljust(casts)}{names}", f"{' ' * casts}{why}"
        texts.append("\n".join(_wrapped(part, width, " " * casts) for part in parts))
    return "\n\n".join(texts), 0


def _wrapped(text: str, width: int, indent: str) -> str:
    return textwrap.fill(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _decisions(policy: Policy, arguments: argparse.Namespace) -> Answer:
    operation = op_catalog.canonical(arguments.operation)
    known = op_catalog.matching(operation)
    if not known:
        raise PolicyError(f"--operation: {op_catalog.unknown(operation)}")
    decided = [policy.decide(name, arguments.module) for name in known]
    if arguments.json:
        return common.as_json([_fields(decision) for decision in decided]), 0
    return "\n\n".join(_text(decision) for decision in decided), 0


def _fields(decision: Decision) -> dict[str, str]:
    rule = decision.rule
    return {
        "operation": decision.operation,
        "cast": decision.cast,
        "layer": decision.layer if rule else "",
        "why": decision.why,
        "source": rule.source if rule else "",
        "note": rule.note if rule else "",
        "rule": decision.origin,
        "torch": op_catalog.catalogue().torch.get(decision.operation, ""),
    }


def _text(decision: Decision) -> str:
    fields = _fields(decision)
    lines = [f"{fields.pop('operation')}: {fields.pop('cast')}"]
    return "\n".join(lines + [f"  {name:<7}{text}" for name, text in fields.items() if text])


def _check(arguments: argparse.Namespace) -> Answer:
    file = arguments.file
    common.check_readable(file)
    try:
        if not _is_policy(file):
            layer = rules_from_file(*signature(file))
            operations = len(layer.reach())
            return f"{file}: ok, {_count(layer.rules)} for XLA_AMP_POLICY, reaching {operations} operations", 0
        policy = load(file)
    except PolicyError as error:
        return str(error), 1
    own = [rule for layer in policy.layers if layer.layer == "file" for rule in layer.rules]
    named = f"policy {policy.name!r}, low = {policy.named_low}"
    return f"{file}: ok, {named}, {_count(own)} in the file, casts {len(policy.operations())} operations", 0


def _is_policy(file: Path) -> bool:
    """Whether the file is a policy (it has a low dtype, or extends one); otherwise it holds rows for XLA_AMP_POLICY."""
    try:
        header = files.parsed(tomllib.loads, read_file(file))
    except ValueError:
        return True
    return not header.keys().isdisjoint(("dtypes", "extends", "jax_low", "low"))


def _count(rules: Sequence[object]) -> str:
    return f"{len(rules)} rule{'' if len(rules) == 1 else 's'}"
