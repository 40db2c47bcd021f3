"""The Mermaid text says the same as the picture."""

from __future__ import annotations

from picture_graphs import chain, declared, leading_back, link, stage, wordcount

from flowchan.viz import to_mermaid

TEXT = to_mermaid(wordcount())


def test_it_runs_from_left_to_right_under_its_title() -> None:
    assert TEXT.startswith('---\ntitle: "wordcount"\n---\nflowchart LR\n')


def test_stages_stand_in_the_box_of_their_placement() -> None:
    threads, processes = TEXT.split("subgraph ")[1:]
    assert '"files<br/>' in threads.split("end\n")[0]
    assert '"counts \N{MULTIPLICATION SIGN}2<br/>' in processes.split("end\n")[0]


def test_a_channel_shows_item_type_capacity_and_medium() -> None:
    assert 'n0 ==>|"Path<br/>64 · processes"| n1' in TEXT
    assert 'n2 -->|"64 · threads"| n4' in TEXT


def test_error_streams_and_results_look_different() -> None:
    assert 'n1 -.->|"64 · processes"| n3' in TEXT
    assert "linkStyle 2 " in TEXT
    assert 'out3[/"result"/]:::result' in TEXT


def test_feedback_is_dashed_and_not_red() -> None:
    text = to_mermaid(leading_back())
    assert 'n2 -.->|"int<br/>64 · processes"| n1' in text
    assert text.count("-.->") == 1
    assert "linkStyle" not in text


def test_every_class_sets_the_colour_of_text_with_its_ground_for_dark_viewers() -> None:
    classes = [line for line in TEXT.splitlines() if "classDef" in line]
    assert classes
    assert all("fill:" in line and ",color:" in line for line in classes)


def test_what_mermaid_reads_as_its_own_is_coded() -> None:
    text = to_mermaid(declared('g"1"', [stage('<b>"#x"</b>'), stage("end")], [link('<b>"#x"</b>', "end")]))
    assert "#60;b#62;#34;#35;x#34;#60;/b#62;" in text
    assert 'title: "g\\"1\\""' in text


def test_a_thousand_stages_are_drawn() -> None:
    assert to_mermaid(chain(1000, 7)).count(">|") == 999
