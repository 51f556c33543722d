"""One file for each framework that rankfeed plugs in to."""
