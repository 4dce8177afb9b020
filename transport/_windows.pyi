from collections.abc import Sequence

from transport.base import Segment

NUM_SLOTS: int
DESCRIPTORS_AT: int
DESCRIPTOR_BYTES: int
PAYLOAD_AT: int

def crc32c(address: int, num_bytes: int, crc: int = 0) -> int: ...
def gather(address: int, segments: Sequence[Segment]) -> int: ...
def create_window_fd(window_bytes: int) -> int: ...

class Link:
    @staticmethod
    def of_socket(control_fd: int) -> Link: ...
    @staticmethod
    def pair() -> tuple[Link, Link]: ...
    def watch(self) -> None: ...
    def end(self, reason: str) -> None: ...
    def event_fd(self) -> int: ...
    @property
    def is_over(self) -> bool: ...
    @property
    def reason(self) -> str: ...
    @property
    def silence_s(self) -> float: ...

class Memory:
    @staticmethod
    def anonymous(window_bytes: int) -> Memory: ...
    @staticmethod
    def of_fd(window_bytes: int, fd: int) -> Memory: ...
    @property
    def address(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...

class Ring:
    """The books of one end whose window, at an address, the peer writes by itself: for rdma.

    window = page of the header (its first 8 bytes: how many of our messages the peer has freed,
    written by the peer) | NUM_SLOTS descriptors from DESCRIPTORS_AT, number n's in slot
    n % NUM_SLOTS | payloads from PAYLOAD_AT. All methods raise CorruptMessageError.
    """

    def __init__(self, window: int, window_bytes: int, peer_window_bytes: int) -> None: ...
    @property
    def max_message_bytes(self) -> int: ...
    @property
    def num_held(self) -> int: ...
    def find_room(self, num_bytes: int) -> int | None:
        """Where in the peer's payloads the next message may lie."""

    def wait_for_room(self, link: Link, num_bytes: int, timeout_s: float, spin_s: float) -> bool:
        """Spins, then yields. False: not in time, or the link is over."""

    def describe(self, at: int, offset: int, num_bytes: int, crc: int) -> int:
        """Writes the next message's descriptor to `at`, to be sent after its payload; its
        number. Tells the peer what we have freed, too."""

    def poll(self, link: Link, timeout_s: float, spin_s: float) -> tuple[int, int, int] | None:
        """Address, bytes and number of the next message, checked."""

    def release(self, number: int) -> bool:
        """Whether the peer should be told now, without waiting for a message to it: write
        tell() into its header. ValueError: not held."""

    def tell(self) -> int:
        """How many messages we have freed; counts as told."""

class Channel:
    spin_s: float
    @property
    def max_message_bytes(self) -> int: ...
    def post(self, segments: Sequence[Segment], timeout_s: float) -> int: ...
    def poll(self, timeout_s: float) -> tuple[int, int, int] | None: ...
    def release(self, number: int) -> None: ...
    def close(self) -> None: ...
    @property
    def is_lost(self) -> bool: ...
    @property
    def silence_s(self) -> float: ...

class SharedChannel(Channel):
    def __init__(self, own: Memory, peers: Memory, link: Link) -> None: ...

class SocketChannel(Channel):
    def __init__(
        self, data_fd: int, own_window_bytes: int, peer_window_bytes: int, link: Link
    ) -> None: ...
