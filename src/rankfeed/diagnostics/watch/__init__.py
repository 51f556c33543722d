"""``rankfeed.watch``: shows the figures of a loader while it is iterated, as a console line or to a function."""
