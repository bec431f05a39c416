"""A GPU reads rows of a table in pinned host memory, also in a CUDA graph."""

import pytest
import torch

from shadowkv.layers.spec import TableForm
from shadowkv.layers.streams.row_table import RowTable

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_a_graph_reads_rows_of_host_memory(stored: torch.dtype) -> None:
    table = RowTable(5000, 160, TableForm("host", stored), torch.bfloat16, torch.device("cuda"))
    assert table.host is not None
    table.host.copy_(torch.randn(5000, 160))
    rows = torch.randint(5000, (64, 16), device="cuda")
    table(rows)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = table(rows)
    for _ in range(3):
        rows.copy_(torch.randint(5000, (64, 16)))
        graph.replay()
        assert torch.equal(found.cpu(), table.host.view(torch.uint8).view(5000, -1)[rows.cpu()].view(stored).bfloat16())
