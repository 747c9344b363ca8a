"""A second port for /metrics that needs no key, as llm-d and Prometheus can read it."""

from __future__ import annotations

from pathlib import Path

import httpx

from tests.server.serving import body, serving

KEY = {"Authorization": "Bearer secret"}


def test_the_second_port_has_metrics_and_probes_only(tmp_path: Path) -> None:
    with serving(tmp_path, "server.metrics_port=0", "server.api_key=secret") as api:
        assert api.http.get("/metrics").status_code == 401
        with httpx.Client(base_url=api.metrics_url, trust_env=False, timeout=20) as http:
            assert [http.get(path).status_code for path in ("/health", "/ready")] == [200, 200]
            lines = http.get("/metrics").text.splitlines()
            assert 'vllm:num_requests_running{model_name="demo"} 0' in lines
            for path in ("/", "/v1/models", "/debug/steps", "/version", "/nothing"):
                refused = http.get(path, headers=KEY)
                assert refused.status_code == 404 and "use server.port" in refused.text
            assert http.post("/v1/chat/completions", json=body(), headers=KEY).status_code == 404
            assert http.post("/metrics").status_code == 405
            foreign = http.get("/metrics", headers={"host": "rebind.test"})
            assert foreign.status_code == 403 and "host_not_allowed" in foreign.text
        keyed = api.http.get("/metrics", headers=KEY).text.splitlines()
        assert 'vllm:num_requests_running{model_name="demo",engine="0"} 0' in keyed
        assert api.engine.generates == []


def test_metrics_need_no_key_if_the_recipe_says_so(tmp_path: Path) -> None:
    """In Kubernetes, llm-d can read no other port than that of the API."""
    with serving(tmp_path, "server.metrics_key=false", "server.api_key=secret") as api:
        lines = api.http.get("/metrics").text.splitlines()
        assert 'vllm:num_requests_running{model_name="demo"} 0' in lines
        foreign = api.http.get("/metrics", headers={"host": "rebind.test"})
        assert foreign.status_code == 403 and "host_not_allowed" in foreign.text
        for path in ("/v1/models", "/debug/steps", "/metrics/", "/version"):
            assert api.http.get(path).status_code == 401
