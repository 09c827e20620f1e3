"""Metrics of the server, in Prometheus's format."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Metrics:
    """Counters and histograms of one server, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "weft_requests", "Requests, by route and status.", ["route", "status"], registry=self.registry
        )
        self.seconds = Histogram(
            "weft_request_seconds", "Time to a whole answer.", ["route"], buckets=SECONDS, registry=self.registry
        )
        self.batch = Histogram(
            "weft_batch_size", "Inputs that shared a batch.", ["model", "kind"], buckets=SIZES, registry=self.registry
        )
        self.active = Gauge("weft_active_requests", "Requests that wait or are answered.", registry=self.registry)
        self.running = Gauge(
            "weft_running_sequences", "Sequences that are being generated.", ["model"], registry=self.registry
        )
        self.tokens = Counter("weft_generated_tokens", "Tokens generated.", ["model"], registry=self.registry)

    def text(self) -> bytes:
        """Return all metrics as text."""
        return generate_latest(self.registry)
