"""Settings of operators: certificates, JSON logs, and metrics of HTTP, the process and calls."""

from __future__ import annotations

import json
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from prometheus_client.parser import text_string_to_metric_families
from serve.served import NAME, served, worded
from toy_engine import CACHING

from specbuild.runtime.errors import RequestError
from specbuild.runtime.serve.server import Address

BODY = {"model": NAME, "prompt": "bcdefghij" * 3, "max_tokens": 9, "ignore_eos": True}


def certificate(folder: Path) -> tuple[Path, Path]:
    """Write a self-signed certificate of 127.0.0.1 and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    certificate_data = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    cert_file, key_file = folder / "cert.pem", folder / "key.pem"
    cert_file.write_bytes(certificate_data.public_bytes(serialization.Encoding.PEM))
    key_file.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return cert_file, key_file


def test_a_server_with_a_certificate_uses_https(tmp_path: Path) -> None:
    cert_file, key_file = certificate(tmp_path)
    address = Address(port=0, ssl_certfile=cert_file, ssl_keyfile=key_file)
    context = ssl.create_default_context(cafile=str(cert_file))
    with served(worded(), address=address) as (base_url, _):
        url = base_url.replace("127.0.0.1", "localhost")
        assert url.startswith("https://")
        plain = httpx.post(f"{url}/v1/completions", json=BODY, verify=context)
        assert plain.status_code == 200
        with httpx.stream(
            "POST", f"{url}/v1/completions", json=BODY | {"stream": True}, verify=context
        ) as stream:
            assert "data: [DONE]" in stream.read().decode()
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")


def test_the_error_names_an_unreadable_certificate(tmp_path: Path) -> None:
    cert_file, key_file = certificate(tmp_path)
    with pytest.raises(RequestError, match="certificate"):
        Address(ssl_certfile=key_file, ssl_keyfile=cert_file)
    with pytest.raises(RequestError, match="certificate"):
        Address(ssl_certfile=tmp_path / "missing.pem")
    with pytest.raises(RequestError, match="--ssl-keyfile needs --ssl-certfile"):
        Address(ssl_keyfile=key_file)


def test_logs_as_json(capfd: pytest.CaptureFixture[str]) -> None:
    with served(worded(), log_requests=True, log_json=True) as (url, _):
        headers = {"x-request-id": "mine"}
        httpx.post(f"{url}/v1/completions", json=BODY, headers=headers)
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("{")]
    entry = json.loads(line)
    assert datetime.fromisoformat(entry.pop("time"))
    assert entry.pop("client").startswith("127.0.0.1:")
    assert entry.pop("duration_ms") >= entry.pop("ttft_ms") > 0
    assert entry == {
        "request_id": "mine", "method": "POST", "route": "/v1/completions", "status": 200,
        "prompt_tokens": 27, "output_tokens": 9,
    }  # fmt: skip


def test_metrics_of_calls_http_and_the_process() -> None:
    with served(worded(settings=CACHING)) as (url, _):
        for n in (1, 3):
            httpx.post(f"{url}/v1/completions", json=BODY | {"n": n}, timeout=300)
        text = httpx.get(f"{url}/metrics").text
    samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.labels.get("handler", "/v1/completions") == "/v1/completions":
                samples.setdefault(sample.name, sample.value)
    assert samples["vllm:request_params_n_count"] == 2
    assert samples["vllm:request_params_n_sum"] == 4
    assert samples["vllm:request_params_max_tokens_sum"] == 4 * 9
    assert samples["vllm:request_max_num_generation_tokens_count"] == 2
    assert samples["vllm:request_max_num_generation_tokens_sum"] == 2 * 9
    assert samples["vllm:request_num_preemptions_count"] == 4
    assert samples["vllm:request_num_preemptions_sum"] == 0
    cached = samples["vllm:prompt_tokens_cached_total"]
    assert cached > 0
    assert samples["vllm:request_prefill_kv_computed_tokens_sum"] == 4 * 27 - cached
    assert samples["http_request_duration_seconds_count"] == 2
    assert samples["http_request_duration_highr_seconds_count"] == 2
    assert samples["process_resident_memory_bytes"] > 0
    assert samples["process_cpu_seconds_total"] > 0
    assert "python_info" in samples
