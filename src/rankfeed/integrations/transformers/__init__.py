"""The Trainer of Transformers: exact shares, resumption by seeking, exact evaluation."""

from rankfeed.integrations.transformers.tokens import PadTokens
from rankfeed.integrations.transformers.trainer import FeedMixin

__all__ = ["FeedMixin", "PadTokens"]
