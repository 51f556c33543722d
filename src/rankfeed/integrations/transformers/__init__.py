"""The Trainer of Transformers: exact shares, resumption by seeking, exact evaluation."""

from rankfeed.integrations.transformers.mixin import FeedMixin
from rankfeed.integrations.transformers.tokens import PadTokens

__all__ = ["FeedMixin", "PadTokens"]
