"""Integrations: a module or subpackage for each framework; what depends on their private details is `_compat`."""
