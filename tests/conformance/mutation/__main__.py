"""``python tests/conformance/mutation``: the share of broken backends that the suite finds."""

from __future__ import annotations

import argparse
import collections
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from mutants import gallery
from mutants.gallery import together

from anydevice_conformance import warm
from anydevice_conformance.rank_kinds import KINDS
from mutation import forked
from mutation.harmless import HARMLESS
from mutation.rules import GROUPS_OF, chosen, made, member_of
from mutation.warm import BIG_MACHINE, MACHINE, Outcome, Trial, checks_of, run_trials


def main() -> int:
    """Try mutants and print what became of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200, help="mutants by rule (default 200)")
    parser.add_argument("--seed", type=int, default=0, help="chooses among all (default 0)")
    parser.add_argument("--only", default="", help="only mutants in whose names this stands")
    parser.add_argument("--gallery", action="store_true", help="the gallery instead of the rules")
    parser.add_argument("--small", action="store_true", help="without those that need 12 GiB")
    parser.add_argument("--together", type=int, help="so many faults of the gallery in one backend")
    parser.add_argument("--whole", action="store_true", help="all checks, not the likely groups")
    parser.add_argument("--laws", action="store_true", help="the laws only: the quickest look")
    parser.add_argument("--quick", action="store_true", help="as certify --quick")
    parser.add_argument("--json", type=Path, help="write the outcomes here")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with warm.process():
        forked.use_warm_process()
        outcomes = (
            _together(args) if args.together else _gallery(args) if args.gallery else _rules(args)
        )
    if args.json:
        args.json.write_text(json.dumps([_plain(o) for o in outcomes], indent=1))
    killed = [o for o in outcomes if o.killed_by or o.flags]
    print(f"{len(killed)} of {len(outcomes)} killed ({len(killed) / max(1, len(outcomes)):.1%})")
    return 0


def _rules(args: argparse.Namespace) -> list[Outcome]:
    drawn = chosen(args.count, args.seed)
    names = [n for n in drawn if args.only in n and n not in HARMLESS]
    if args.only and not names:
        names = [n for n in made() if args.only in n]
    for name in set(drawn) & set(HARMLESS):
        print(f"harmless {name}: {HARMLESS[name]}", file=sys.stderr)
    outcomes = run_trials(
        [Trial(None, lambda name: 0, first=False, seconds=600)] * bool(args.whole)
        + [Trial(n, _chooser(member_of(n), args)) for n in names],
        quick=args.quick,
        tell=_line,
    )
    counts: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0])
    for outcome in outcomes:
        if outcome.mutant is None:
            assert not outcome.killed_by, f"a false alarm: {outcome.results('failed', 'error')}"
            continue
        counts[member_of(outcome.mutant)][0] += bool(outcome.killed_by)
        counts[member_of(outcome.mutant)][1] += 1
    for member, (killed, all_) in counts.items():
        print(f"{member:24} {killed:3} of {all_:3} ({killed / all_:.0%})")
    return [o for o in outcomes if o.mutant]


def _together(args: argparse.Namespace) -> list[Outcome]:
    """Backends with many faults at once; every check is tried on each."""
    names = [together(args.together, args.seed + n) for n in range(args.count)]
    trials = [Trial(name, lambda check: 0, seconds=600) for name in names]
    return run_trials(trials, quick=args.quick, tell=_line)


#: These find most, so they come first.
_LAWS = ("MOV_025", "MOV_026", "DEV_012", "DEV_013", "STR_017", "STR_018")


def _chooser(member: str, args: argparse.Namespace):
    groups = () if args.laws else GROUPS_OF[member]

    def choose(check: str) -> int | None:
        group = check[5:8]
        if check[5:12] in _LAWS:
            return -1
        if group in groups:
            return groups.index(group)
        return len(groups) + (group == "INF") if args.whole else None

    return choose


#: The first examples find all: they are tried to the end, since the ranks stay in step.
_FEW = {"COL-012": 2 * len(KINDS), "COL-013": 30, "COL-014": 30}


def _gallery(args: argparse.Namespace) -> list[Outcome]:
    outcomes = []
    mutants = [m for m in gallery().values() if args.only in m.name and not m.crash]
    mutants = [m for m in mutants if not (m.big and args.small)]
    for base, big in sorted({(m.base, m.big) for m in mutants}):
        mine = [m for m in mutants if (m.base, m.big) == (base, big)]
        trials = [
            Trial(
                m.name,
                checks_of(m.paragraph, m.check),
                examples=_FEW.get(m.paragraph),
                operators=m.operators,
            )
            for m in mine
        ]
        options = BIG_MACHINE if big else MACHINE
        outcomes += run_trials(trials, base=base, options=options, quick=args.quick, tell=_line)
    return outcomes


def _line(outcome: Outcome) -> None:
    if outcome.killed_by and os.environ.get("VERBOSE"):
        print(f"{outcome.mutant}: {outcome.killed_by} {outcome.cpu:.1f}", file=sys.stderr)
    if not outcome.killed_by and outcome.mutant:
        end = "flagged" if outcome.flags else "SURVIVED"
        print(f"{end} {outcome.mutant} ({outcome.seconds:.1f} s)", file=sys.stderr, flush=True)


def _plain(outcome: Outcome) -> dict[str, object]:
    return {
        "mutant": outcome.mutant,
        "killed_by": outcome.killed_by,
        "flags": outcome.flags,
        "seconds": round(outcome.seconds, 3),
        "cpu": round(outcome.cpu, 3),
        "failed": outcome.results("failed")[:3],
        "errors": outcome.results("error"),
        "statuses": [
            r["status"]
            for r in outcome.results(
                "passed", "skipped", "not claimed", "no hardware", "failed", "error"
            )
        ],
        "end": outcome.end,
    }


if __name__ == "__main__":
    sys.exit(main())
