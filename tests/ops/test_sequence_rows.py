"""Rows of one sequence in ops that can read its pages once for all of them: with ``SequenceRows`` results are those of
rows for themselves."""

import torch

from shadowkv.ops.sequence_rows import SequenceRows


def test_queries_fold_and_unfold(seed: int) -> None:
    """Sequences of 3, 0, 1 and 4 rows."""
    starts = torch.tensor([0, 3, 3, 4, 8])
    rows, heads, group, dim = SequenceRows(starts, 4), 2, 3, 5
    q = torch.randn(8, heads * group, dim)
    folded = rows.fold(q, heads)
    assert folded.shape == (4, heads * 4 * group, dim)
    by_row = folded.view(4, heads, 4, group, dim)
    for sequence, row, place in ((0, 0, 0), (0, 2, 2), (2, 3, 0), (3, 4, 0), (3, 7, 3)):
        assert torch.equal(by_row[sequence, :, place].flatten(0, 1), q[row])
    assert torch.equal(rows.unfold(folded, heads, 8), q)
    assert torch.equal(rows.unfold(folded[..., 0], heads, 8), q[..., 0])
    assert rows.first[[0, 2, 3]].tolist() == [0, 3, 4]
