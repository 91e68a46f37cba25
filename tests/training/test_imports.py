"""What a restarted rank imports on its way back to training."""

import json
import subprocess
import sys
from pathlib import Path

HEAVY = {"transformers", "datasets", "tokenizers", "tensorboard", "prometheus_client", "torchao", "pandas", "pyarrow"}


def test_a_restarted_rank_imports_nothing_heavy_that_it_may_not_need():
    code = (
        "import json, sys; import training.train, training.trainer, training.resilience, training.checkpoint.writer;"
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    )
    finished = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = set(json.loads(finished.stdout.splitlines()[-1]))
    assert {"torch", "nvidia_resiliency_ext"} <= loaded
    assert loaded & HEAVY == set()
