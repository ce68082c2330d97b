"""Plain reference for the wire: the same blobs over one gRPC stream between two processes."""

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc  # type: ignore[import-untyped]

CHUNK_BYTES = 1024 * 1024
METHOD = "/plain.Stream/Blob"
START_SECONDS = 60.0


def _chunks(path: bytes, _: grpc.ServicerContext) -> Iterator[bytes]:
    with open(path.decode(), "rb", buffering=0) as file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk


def serve() -> None:
    """Serve files by name on a free loopback port until standard input ends.

    The port is printed.
    """
    server = grpc.server(ThreadPoolExecutor(1))
    handlers = {"Blob": grpc.unary_stream_rpc_method_handler(_chunks)}
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("plain.Stream", handlers),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(port, flush=True)
    sys.stdin.read()


def receive(blobs: Sequence[Path], folder: Path) -> float:
    """Return the seconds to copy blobs into ``folder``, without the start of the server process.

    Each blob is a file that is named by its SHA-256.

    Raises
    ------
    SystemExit
        A received blob has another hash.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as serving:
        assert serving.stdin is not None
        assert serving.stdout is not None
        port = int(serving.stdout.readline())
        try:
            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                grpc.channel_ready_future(channel).result(START_SECONDS)
                stream = channel.unary_stream(METHOD)
                started = time.perf_counter()
                for number, blob in enumerate(blobs):
                    _receive(stream(str(blob).encode()), folder / f"{number:05d}", blob.stem)
                return time.perf_counter() - started
        finally:
            serving.stdin.close()


def _receive(chunks: Iterator[bytes], path: Path, expected: str) -> None:
    digest = hashlib.sha256()
    with open(path, "wb") as file:
        for chunk in chunks:
            digest.update(chunk)
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    if digest.hexdigest() != expected:
        raise SystemExit(
            f"plain stream: {path} has the hash {digest.hexdigest()}, expected {expected}"
        )


if __name__ == "__main__":
    serve()
