"""Draw epoch.svg: one epoch of 24 samples, begun on 2 ranks and resumed on 3.

python docs/images/epoch.py > docs/images/epoch.svg
"""

import sys

import rankfeed as rf

COLORS = ("#a6cbf0", "#f7c99b", "#b9dfae")
CELL, MARGIN = 34, 12
STYLE = """
.title, .note, .cut { text-anchor: start }
.title { font-size: 16px; font-weight: bold }
.id { font-size: 16px }
.rank, .step, .note { font-size: 13px; fill: #444 }
.cut { font-size: 14px; fill: #a11 }
.bracket { stroke: #888; fill: none }"""


def steps_of(plan: rf.Plan, ranks: int, start: int, steps: int) -> list[list[list[int]]]:
    """The sample ids of each step and rank."""
    schedules = [
        rf.Schedule(plan, batch_size=2, topology=rf.Topology(rank, ranks), start=start) for rank in range(ranks)
    ]
    return [[schedule.batch(step).tolist() for schedule in schedules] for step in range(steps)]


def text(x: float, y: int, words: str, kind: str) -> str:
    """A text element."""
    return f'<text x="{x:g}" y="{y}" class="{kind}">{words}</text>'


def draw_steps(steps: list[list[list[int]]], y: int) -> list[str]:
    """Brackets for steps, a cell for each sample, and the rank below its cells."""
    lines, x = [], MARGIN
    for number, step in enumerate(steps):
        width = CELL * sum(map(len, step))
        lines.append(text(x + width / 2, y, f"step {number + 1}", "step"))
        lines.append(f'<path d="M{x + 3} {y + 9} v-4 h{width - 6} v4" class="bracket"/>')
        for rank, ids in enumerate(step):
            for place, sample in enumerate(ids):
                left = x + place * CELL
                place_and_size = f'x="{left + 1}" y="{y + 13}" width="{CELL - 2}" height="30"'
                lines.append(f'<rect {place_and_size} rx="3" fill="{COLORS[rank]}"/>')
                lines.append(text(left + CELL / 2, y + 34, str(sample), "id"))
            lines.append(text(x + CELL * len(ids) / 2, y + 59, f"rank {rank}", "rank"))
            x += CELL * len(ids)
    return lines


def svg() -> str:
    """The picture."""
    plan = rf.Plan(24, seed=1)
    lines = [
        text(MARGIN, 24, "Positions 0 to 11: 2 ranks, batch size 2", "title"),
        *draw_steps(steps_of(plan, ranks=2, start=0, steps=3), 48),
        text(MARGIN, 138, "killed; the checkpoint says: 12 samples delivered", "cut"),
        text(MARGIN, 172, "Positions 12 to 23: resumed on 3 ranks", "title"),
        *draw_steps(steps_of(plan, ranks=3, start=12, steps=2), 196),
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {12 * CELL + 2 * MARGIN} 270" role="img"',
            ' font-family="Helvetica, Arial, sans-serif" text-anchor="middle" fill="#111">',
            "<title>Sample ids in shuffled order: two ranks read 12, then three ranks the other 12</title>",
            f"<style>{STYLE}\n</style>",
            '<rect width="100%" height="100%" rx="8" fill="#fff"/>',
            *lines,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    sys.stdout.write(svg())
