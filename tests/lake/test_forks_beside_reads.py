"""Forks by anybody beside reads of an object store hang neither the parent nor the child.

A process reads ranges in eight threads while it forks in every way that programs do. Every child ends by itself, and
every thread goes on after every fork. Children that read, too, read through s3fs. The test forks 40 times, or as
often as LAKECKPT_FORKS says.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

import lakeckpt
from tests.lake.one_object import SERVER_STARTS

ROOT = Path(__file__).parents[2]
FORKS = int(os.environ.get("LAKECKPT_FORKS", "40"))
READER = """
import gc, multiprocessing, os, subprocess, sys, threading, time
import torch
from torch.utils.data import DataLoader, Dataset
from lakeckpt.lake.storage.open import open_storage
from tests.lake.one_object import CONTENT

def expected(at):
    return CONTENT[at:at + 50_000]

def reads(n):
    at = n
    while not stop.is_set():
        at = (at * 7919 + 1) % 900_000
        assert storage.read("x", at, at + 50_000, etag="one") == expected(at)
        done[n] += 1

class Numbers(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        gc.collect()
        return index

class OfTheStore(Numbers):
    def __getitem__(self, index):
        assert storage.read("x", index, index + 50_000, etag="one") == expected(index)
        return index

def child_that_exits():
    pid = os.fork()
    if not pid:
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0

def child_that_ends_as_an_interpreter():
    pid = os.fork()
    if not pid:
        sys.exit(0)
    assert os.waitpid(pid, 0)[1] == 0

def child_of_multiprocessing():
    child = multiprocessing.get_context("fork").Process(target=gc.collect)
    child.start()
    child.join(60)
    assert child.exitcode == 0

def child_program():
    assert subprocess.run(["/bin/true"], preexec_fn=gc.disable).returncode == 0

def workers():
    assert len(list(DataLoader(Numbers(), num_workers=2, multiprocessing_context="fork", timeout=60))) == 4

def workers_that_read():
    assert len(list(DataLoader(OfTheStore(), num_workers=2, multiprocessing_context="fork", timeout=60))) == 4

KINDS = [child_that_exits, child_of_multiprocessing, child_program, child_that_ends_as_an_interpreter, workers]

if __name__ == "__main__":
    url, certificate, forks = sys.argv[1], sys.argv[2], int(sys.argv[3])
    options = {"key": "k", "secret": "s", "endpoint": url, "region": "us-east-1", "verify": certificate}
    storage = open_storage("s3://bucket/run", storage_options=options)
    stop, done = threading.Event(), [0] * 8
    threads = [threading.Thread(target=reads, args=(n,), daemon=True) for n in range(8)]
    for thread in threads:
        thread.start()
    for fork in range(forks):
        before = list(done)
        (workers_that_read if fork % 50 == 5 else KINDS[fork % len(KINDS)])()
        until = time.monotonic() + 60
        while any(now == then for now, then in zip(done, before)):
            if time.monotonic() > until or not all(thread.is_alive() for thread in threads):
                print("a reading thread hangs after fork", fork, before, done, flush=True)
                os._exit(3)
            time.sleep(0.002)
    stop.set()
    for thread in threads:
        thread.join(60)
    print("forked", forks, "read", sum(done))
"""


@contextmanager
def serving(folder: Path, *, tls: bool) -> Iterator[tuple[str, str]]:
    """Serve one object in a process of its own; yield its URL and the path of a certificate to trust."""
    certificate = _certificate(folder)
    told = [sys.executable, "-c", SERVER_STARTS, str(certificate) if tls else ""]
    with subprocess.Popen(told, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield f"{'https' if tls else 'http'}://127.0.0.1:{int(server.stdout.readline())}", str(certificate)
        finally:
            server.kill()


def _certificate(folder: Path) -> Path:
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    alternative = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=2))
        .add_extension(alternative, critical=False)
        .sign(key, hashes.SHA256())
    )
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / "both.pem").write_bytes(secret + made.public_bytes(serialization.Encoding.PEM))
    (folder / "certificate.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    ssl.create_default_context(cafile=folder / "certificate.pem")
    return folder / "certificate.pem"


@pytest.mark.parametrize("tls", [False, True], ids=["http", "https"])
@pytest.mark.timeout(2400)  # a fork in a process that reads takes a quarter of a second and more
@pytest.mark.soak
def test_forks_beside_reads_hang_neither_side(tmp_path: Path, tls: bool) -> None:
    (tmp_path / "reader.py").write_text(READER)
    with serving(tmp_path, tls=tls) as (url, certificate):
        told = [sys.executable, "-W", "ignore", str(tmp_path / "reader.py"), url, certificate, str(FORKS)]
        source = Path(lakeckpt.__file__).parents[1]  # Python looks for modules of a script in its own folder alone
        environment = {**os.environ, "PYTHONPATH": f"{source}{os.pathsep}{ROOT}"}
        ran = subprocess.run(told, capture_output=True, text=True, timeout=120 + 2 * FORKS, env=environment)
    assert ran.returncode == 0 and f"forked {FORKS}" in ran.stdout, ran.stdout + ran.stderr[-4000:]
