"""The page of clients: a table that is written again, and sections that are kept."""

from pathlib import Path

import client_matrix


def test_sections_by_hand_outlive_a_new_table(tmp_path: Path) -> None:
    path = tmp_path / "clients.md"
    assert client_matrix.kept_sections(path) == ""
    results = {"openai": dict.fromkeys(client_matrix.CASES, "yes")}
    table = client_matrix.page(results, {"openai": "1.0"}, "small")
    path.write_text(table + "\n## Others\n\nby hand\n\n## More\n", encoding="utf-8")
    assert table + client_matrix.kept_sections(path) == path.read_text(encoding="utf-8")
    pages = Path(__file__).parents[2] / "docs" / "clients.md"
    assert client_matrix.kept_sections(pages).startswith("\n## guidellm\n")
