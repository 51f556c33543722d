"""How well a plan shuffles, in charts beside numpy's own shuffle and a perfect one."""

from collections.abc import Sequence

from rankfeed.diagnostics.report import shuffle
from rankfeed.diagnostics.report.binning import Int64
from rankfeed.diagnostics.report.page import Bars, Figure, Lines, Listing, Series, number
from rankfeed.plan.schedule import SampleOrder


def shuffle_figures(plan: SampleOrder, epoch: int, starts: Int64, batch: int) -> list[Figure]:
    """The figures of an epoch's order.

    Args:
        plan: the order.
        epoch: which.
        starts: where blocks begin, and the number of samples at the end.
        batch: samples of a global batch.
    """
    n = plan.num_samples
    found = shuffle.quality(lambda positions: plan.sample_ids(epoch, positions), starts, batch)
    drawn = shuffle.quality(shuffle.numpys(n), starts, batch)
    distance, near, blocks = shuffle.perfect(starts, batch)
    _, sentence = shuffle.judged(found, starts, batch)
    tenths = [f"{low * 10}" for low in range(shuffle.BINS)]
    rows = [
        ["distance of neighbours, mean", f"{found.distance:.1%}", f"{drawn.distance:.1%}", f"{distance:.1%}"],
        ["correlation of neighbours", f"{found.correlations[0]:.3f}", f"{drawn.correlations[0]:.3f}", "0"],
    ]
    if len(starts) > 2:
        rows.append(["blocks in a global batch, mean", number(found.blocks), number(drawn.blocks), number(blocks)])
    if found.spread is not None:
        told = "" if drawn.spread is None else f"{drawn.spread:.0%}"
        rows.append(["time over which a block is spread", f"{found.spread:.0%}", told, "100%"])
    return [
        Listing(
            title="In figures",
            caption=sentence + " Distances are shares of the data set.",
            header=["", "this order", "numpy's", "perfect"],
            rows=rows,
        ),
        Bars(
            title="How far neighbours lie apart",
            caption=f"Samples that follow each other in the order, {found.pairs:,} pairs: how far apart they lie "
            "in the data set. A perfect shuffle has few far pairs, in a straight slope down.",
            axis="distance, % of the data set",
            labels=tenths,
            series=_three(found.near, drawn.near, near, 100.0),
            unit="% of pairs",
        ),
        Lines(
            title="What a sample tells of later ones",
            caption="Correlation of where samples lie with where those lie that come so many positions later "
            "(doubling from 1). A perfect shuffle stays at 0, but for chance.",
            axis="doublings of the distance in the order",
            x=[float(lag) for lag in range(len(found.lags))],
            series=[
                Series("this order", _rounded(found.correlations)),
                Series("numpy", _rounded(drawn.correlations)),
            ],
            unit="correlation",
            low=-0.1,
            high=0.1,
        ),
    ]


def _three(found: list[float], drawn: list[float], perfect: list[float], scale: float) -> list[Series]:
    names = ("this order", "numpy", "perfect")
    return [
        Series(name, _rounded([value * scale for value in each]))
        for name, each in zip(names, (found, drawn, perfect), strict=True)
    ]


def _rounded(values: Sequence[float]) -> list[float | None]:
    return [round(value, 4) for value in values]
