"""The verdict as one HTML page that needs nothing else: no script, no font, no request.

How: plain string pieces, everything from outside escaped; the picture is embedded; the timeline is an inline SVG.

Never: it decides nothing; the verdict does.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from lakeckpt.cli.demo.facts import Facts
from lakeckpt.cli.demo.scenario import topology
from lakeckpt.cli.demo.verdict import FaultCost, JobFacts, Verdict

__all__ = ["write_page"]

_STYLE = """
:root { --ink: #1c2430; --soft: #5c6776; --line: #e3e7ed; --paper: #fff; --wash: #f6f8fa;
        --good: #14804a; --goodwash: #e9f6ef; --bad: #c3212e; --badwash: #fdecee; --blue: #0b62d6; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--wash); color: var(--ink);
       font: 16px/1.55 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 40px 24px 64px; }
header p { color: var(--soft); margin: 6px 0 0; max-width: 70ch; }
h1 { font-size: 30px; line-height: 1.2; margin: 14px 0 0; letter-spacing: -.01em; }
h2 { font-size: 19px; margin: 44px 0 12px; }
.verdict { display: inline-block; padding: 4px 14px; border-radius: 999px; font-weight: 600; font-size: 14px; }
.good { color: var(--good); } .bad { color: var(--bad); }
.verdict.good { background: var(--goodwash); } .verdict.bad { background: var(--badwash); }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(190px, 1fr)); gap: 14px; margin: 28px 0 0; }
.figure, .card { background: var(--paper); border: 1px solid var(--line); border-radius: 10px; }
.figure { padding: 16px 18px; }
.figure b { display: block; font-size: 28px; line-height: 1.25;
            white-space: nowrap; font-variant-numeric: tabular-nums; }
.figure span { color: var(--soft); font-size: 14px; }
.card { padding: 18px; overflow-x: auto; }
.card img, .card svg { display: block; width: 100%; height: auto; }
ul.checks { list-style: none; margin: 0; padding: 0; }
ul.checks li { display: grid; grid-template-columns: 30px 1fr; padding: 10px 0; border-top: 1px solid var(--line); }
ul.checks li:first-child { border-top: 0; padding-top: 0; } ul.checks li:last-child { padding-bottom: 0; }
ul.checks i { font-style: normal; font-weight: 700; }
ul.checks span { color: var(--soft); display: block; font-size: 14px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th { text-align: left; color: var(--soft); font-weight: 600; white-space: nowrap; }
th, td { padding: 9px 12px 9px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
tr:last-child td { border-bottom: 0; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.w { white-space: nowrap; }
.dot { display: inline-block; width: 22px; height: 22px; line-height: 22px; border-radius: 50%; text-align: center;
       background: #d92d3a; color: #fff; font-size: 12px; font-weight: 700; }
dl { display: grid; grid-template-columns: 170px 1fr; gap: 6px 16px; margin: 0; font-size: 15px; }
dt { color: var(--soft); } dd { margin: 0; }
pre { background: #1c2430; color: #e8edf4; border-radius: 10px; padding: 16px 18px; overflow-x: auto; font-size: 13.5px;
      line-height: 1.6; margin: 0; }
p.note { color: var(--soft); font-size: 14px; margin: 10px 2px 0; }
footer { color: var(--soft); font-size: 13px; margin-top: 48px; }
"""


def _figures(verdict: Verdict) -> str:
    equal, unchanged = verdict.equal_steps, verdict.unchanged_steps
    lost = sum(count.lost for count in verdict.rows)
    repeated = sum(count.repeated for count in verdict.rows)
    items = [
        (f"{lost:,}", "rows lost", lost == 0),
        (f"{repeated:,}", "rows repeated", repeated == 0),
        (f"{equal:,} / {unchanged:,}", "steps bitwise equal to the run without faults", equal == unchanged > 0),
        (f"{len(verdict.faults)}", "faults by SIGKILL, each one survived", True),
        (f"{100 * verdict.overhead:.1f} %", f"of time for {verdict.saves} saves, {verdict.save_ms:.0f} ms each", True),
    ]
    cells = "".join(
        f'<div class="figure"><b class="{"" if fine else "bad"}">{escape(value)}</b><span>{escape(name)}</span></div>'
        for value, name, fine in items
    )
    return f'<div class="figures">{cells}</div>'


def _checks(verdict: Verdict) -> str:
    items = "".join(
        f'<li><i class="{"good" if check.holds else "bad"}">{"✓" if check.holds else "✗"}</i>'
        f"<div>{escape(check.claim)}<span>{escape(check.seen)}</span></div></li>"
        for check in verdict.checks
    )
    return f'<div class="card"><ul class="checks">{items}</ul></div>'


def _table(heads: Sequence[tuple[str, bool]], rows: Iterable[Sequence[str]]) -> str:
    """``heads`` are (name, whether a number); the cells are HTML already."""
    kinds = [' class="n"' if number else "" for _, number in heads]
    head = "".join(f"<th{kind}>{escape(name)}</th>" for (name, _), kind in zip(heads, kinds, strict=True))
    lines = ("".join(f"<td{kind}>{cell}</td>" for cell, kind in zip(row, kinds, strict=True)) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="card"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _faults(costs: Sequence[FaultCost]) -> str:
    heads = [
        *(("", False), ("killed", False), ("at step", True), ("where", False), ("came back as", False)),
        *(("steps again", True), ("noticed", True), ("restored", True), ("there again", True)),
        ("time lost", True),
    ]
    rows = [
        [
            f'<span class="dot">{cost.number}</span>',
            f'<span class="w">{escape(cost.who)}</span>',
            *map(escape, (f"{cost.step:,}", cost.where)),
            f'<span class="w">{escape(cost.after)}</span>',
            str(cost.recomputed_steps),
            *(f"{seconds:.1f} s" for seconds in (cost.notice_s, cost.restart_s, cost.recompute_s)),
            f"<b>{cost.lost_s:.1f} s</b>",
        ]
        for cost in costs
    ]
    return _table(heads, rows)


def _timeline(faulted: JobFacts, costs: Sequence[FaultCost]) -> str:
    """Each launch as a bar over wall time: starting (grey), making lost steps again (red), making progress (blue)."""
    outcome, began = faulted.outcome, faulted.outcome.began
    scale = 1000 / max(1e-9, outcome.ended - began)
    height = 30 * len(faulted.launches) + 30
    parts = [f'<svg viewBox="0 0 1200 {height}" role="img" aria-label="The launches over time" font-size="13">']

    def bar(row: int, start: float, end: float, colour: str) -> None:
        x, width = 170 + (start - began) * scale, max(0.0, (end - start) * scale)
        parts.append(f'<rect x="{x:.1f}" y="{row * 30 + 4}" width="{width:.1f}" height="18" rx="2" fill="{colour}"/>')

    for row, launch in enumerate(faulted.launches):
        start = outcome.launched[launch.launch]
        death = next((death for death in outcome.deaths if death.launch == launch.launch), None)
        end = death.killed if death is not None else max([launch.ready, *(s.ended for s in launch.steps.values())])
        again = next((c.recompute_s for c, d in zip(costs, outcome.deaths, strict=False) if d.launch == row - 1), 0.0)
        text = topology(launch.world_size, launch.workers)
        parts.append(f'<text x="0" y="{row * 30 + 18}" fill="#1c2430">{text}</text>')
        bar(row, start, launch.ready, "#d4d9e1")
        bar(row, launch.ready, launch.ready + again, "#e98a92")
        bar(row, launch.ready + again, end, "#0b62d6")
        if death is not None:
            x, y = 170 + (death.killed - began) * scale, row * 30 + 13
            parts.append(f'<circle cx="{x:.1f}" cy="{y}" r="10" fill="#d92d3a" stroke="#fff" stroke-width="2"/>')
            parts.append(
                f'<text x="{x:.1f}" y="{y + 4.5}" fill="#fff" font-size="12" font-weight="700" '
                f'text-anchor="middle">{death.launch + 1}</text>'
            )
    parts.append(_axis(outcome.ended - began, scale, height))
    return f'<div class="card">{"".join(parts)}</svg></div>'


def _axis(seconds: float, scale: float, height: int) -> str:
    every = next((unit for unit in (1, 2, 5, 10, 20, 30, 60, 120, 300) if seconds / unit <= 10), 600)
    ticks = range(0, int(seconds) + 1, every)
    return "".join(
        f'<text x="{170 + tick * scale:.1f}" y="{height - 6}" fill="#5c6776" text-anchor="middle">{tick} s</text>'
        for tick in ticks
    )


def _legend() -> str:
    items = {"#d4d9e1": "starting", "#e98a92": "making lost steps again", "#0b62d6": "training", "#d92d3a": "SIGKILL"}
    dots = " &nbsp; ".join(f'<span style="color:{colour}">■</span> {name}' for colour, name in items.items())
    return f'<p class="note">{dots}</p>'


def write_page(path: Path, picture: Path | None, verdict: Verdict, facts: Facts, faulted: JobFacts) -> None:
    """Write the page; ``picture`` is a PNG to embed."""
    colour, word = ("good", "Verdict: green") if verdict.green else ("bad", "Verdict: red")
    title = (
        f"{len(verdict.faults)} kills, and every row counted exactly once"
        if verdict.green
        else "The promise did not hold in this run"
    )
    image = ""
    if picture is not None:
        data = base64.b64encode(picture.read_bytes()).decode()
        image = f'<div class="card"><img alt="Loss curves of both runs" src="data:image/png;base64,{data}"></div>'
    details = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.lines)
    commands = escape("\n".join(facts.commands))
    path.write_text(
        f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>lakeckpt demo: {escape(title)}</title><style>{_STYLE}</style></head><body><main>
<header><span class="verdict {colour}">{word}</span><h1>{escape(title)}</h1>
<p>{escape(facts.summary)}</p></header>
{_figures(verdict)}
<h2>Both runs</h2>{image}
<h2>What was checked</h2>{_checks(verdict)}
<h2>What the faults cost</h2>{_faults(verdict.faults)}
<h2>The launches</h2>{_timeline(faulted, verdict.faults)}{_legend()}
<h2>What was run</h2><div class="card"><dl>{details}</dl></div>
<h2>Look for yourself</h2><pre>{commands}</pre>
<footer>{escape(facts.footer)}</footer>
</main></body></html>
""",
        encoding="utf-8",
    )
