"""Shows the figures of a loader while it is iterated: a console line, or a function of the user."""
