"""Opens the publisher of K/V events that the settings ask for."""

from __future__ import annotations

import logging
import socket

from memory.prefix.block_recorder import BlockRecorder
from serve.config import EngineConfig
from serve.events.publisher import EventPublisher

logger = logging.getLogger(__name__)


def open_events(config: EngineConfig, recorder: BlockRecorder) -> EventPublisher:
    """Returns the publisher, which is to be started and closed. Raises ConfigError."""
    assert config.kv_events is not None
    if not recorder.has_blocks:
        # A hit needs only the last window of such a model: blocks from the first token on would
        # promise what is not there.
        logger.warning("kv_events: every layer of this model has a window, so nothing is published")
    topic = config.kv_events_topic or f"kv@{socket.gethostname()}@{config.model_name}"
    return EventPublisher(
        recorder,
        config.kv_events,
        topic,
        config.kv_events_replay_endpoint,
        as_maps=config.kv_events_format == "map",
    )
