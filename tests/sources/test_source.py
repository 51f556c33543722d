"""What all sources share."""

from rankfeed.sources.source import probe_ids


def test_probes_are_evenly_spaced_and_at_most_all_samples() -> None:
    assert probe_ids(1001).tolist() == [0, 125, 250, 375, 500, 625, 750, 875]
    assert probe_ids(3).tolist() == [0, 1, 2]
