"""Test that the Mermaid text shows the same content as the picture."""

from __future__ import annotations

from picture_graphs import chain, declared, edge, leading_back, stage, wordcount

from flowchan.viz import to_mermaid

TEXT = to_mermaid(wordcount())


def test_mermaid_has_title_and_left_to_right_layout() -> None:
    assert TEXT.startswith('---\ntitle: "wordcount"\n---\nflowchart LR\n')


def test_mermaid_class_encodes_role_and_placement() -> None:
    assert ":::source_threads" in TEXT
    assert '"counts \N{MULTIPLICATION SIGN}2<br/>' in TEXT
    assert ":::stage_processes" in TEXT


def test_a_channel_shows_its_item_type_but_no_defaults() -> None:
    assert 'n0 ==>|"Path"| n1' in TEXT
    assert "n2 --> n4" in TEXT


def test_error_streams_and_results_look_different() -> None:
    assert "n1 -.-> n3" in TEXT
    assert "linkStyle 2 " in TEXT
    assert 'out3[/"result total"/]:::result' in TEXT


def test_feedback_is_dashed_and_not_red() -> None:
    text = to_mermaid(leading_back())
    assert 'n2 -.->|"int"| n1' in text
    assert text.count("-.->") == 1
    assert "linkStyle" not in text


def test_every_class_sets_text_and_background_colours() -> None:
    classes = [line for line in TEXT.splitlines() if "classDef" in line]
    assert classes
    assert all("fill:" in line and ",color:" in line for line in classes)


def test_special_mermaid_characters_are_encoded() -> None:
    text = to_mermaid(declared('g"1"', [stage('<b>"#x"</b>'), stage("end")], [edge('<b>"#x"</b>', "end")]))
    assert "#60;b#62;#34;#35;x#34;#60;/b#62;" in text
    assert 'title: "g\\"1\\""' in text


def test_a_thousand_stages_are_drawn() -> None:
    assert to_mermaid(chain(1000, 7)).count(">|") == 999


def test_long_graph_is_drawn_from_top_to_bottom() -> None:
    assert "flowchart LR" in to_mermaid(chain(6, 7))
    assert "flowchart TB" in to_mermaid(chain(7, 7))
