use super::{
    super::{
        markup::assert_well_formed,
        snapshot::{BlockInfo, BlockState, ChunkInfo, EventKind, MemoryEvent, tests as snapshots},
    },
    *,
};
use proptest::prelude::*;

/// The attribute as a number.
fn number(element: &str, name: &str) -> f64 {
    let (_, after) = element.split_once(&format!(" {name}=\"")).unwrap_or_else(|| panic!("{name} in {element}"));
    after.split_once('"').unwrap().0.parse().unwrap()
}

fn rectangles<'a>(svg: &'a str, class: &str) -> Vec<&'a str> {
    let begin = format!("<rect class=\"{class}");
    svg.lines().filter(|line| line.starts_with(&begin)).collect()
}

#[test]
fn a_block_is_where_and_when_it_was() {
    let svg = standalone(&snapshots::example());
    assert_well_formed(&svg);
    let event = WIDTH / 9.0;

    // 16 of the 32 MiB of the chunk that was given back, from the second event to the fourth.
    let [chunk_low, chunk_high] = rectangles(&svg, "chunk")[..] else { panic!("{svg}") };
    // Both of the call site with the highest peak; the other one is the pending one.
    let [_, gone] = rectangles(&svg, "b c0 s0")[..] else { panic!("{svg}") };
    assert!((number(gone, "x") - event).abs() < 0.01 && (number(gone, "width") - (2.0 * event - 0.6)).abs() < 0.01);
    assert!((number(gone, "height") - (number(chunk_high, "height") / 2.0 - 0.6)).abs() < 0.02);
    assert!((number(chunk_high, "width") - 4.0 * event).abs() < 0.01);
    assert!((number(chunk_low, "width") - WIDTH).abs() < 0.01);
    assert!(number(chunk_high, "y") < number(chunk_low, "y"), "higher addresses are higher up");

    assert!(svg.contains("16.0 MiB at 0x10000000, asked for 16.0 MiB\nupload at src/train.rs:10:9\non stream 2\n"));
    assert!(svg.contains("from 200 us to 1.00 ms: 800 us, freed by another thread"));
    assert!(svg.contains("until 1.40 ms, freed<"), "what was there before has no birth");
    assert_eq!(svg.matches("class=\"refused\"").count(), 2, "in both plots");
    assert_eq!(svg.matches("fill=\"url(#hatch-0)\"").count(), 1);
    assert!(svg.contains("Vec&lt;f32&gt;::zeros &amp; co &quot;quoted&quot; at src/train.rs:20:9, at most 4.0 MiB"));
    assert!(svg.contains("</tspan> (filled) 5.0 MiB now, <tspan class=\"name\">reserved</tspan> (line) 8.0 MiB now"));
}

#[test]
fn curves_keep_their_peaks() {
    let mut levels = vec![1.0; 100_000];
    levels[77_777] = 50.0;
    let path = steps(&levels, |level| level);
    assert!(
        path.starts_with("M0 1.00H") && path.contains("V50.00") && path.ends_with(&format!("V1.00H{WIDTH}")),
        "{path}"
    );
    // What does not change needs no points.
    assert_eq!(path.matches('V').count(), 2);
}

/// A program that retries after each refusal would else paint everything red.
#[test]
fn many_refusals_do_not_hide_the_rest() {
    let refused = |micros| MemoryEvent {
        micros,
        kind: EventKind::OutOfMemory,
        address: 0,
        bytes: 1,
        requested: 1,
        stream: 0,
        site: None,
    };
    let lines = |count| {
        let svg = standalone(&MemorySnapshot { events: (0..count).map(refused).collect(), ..Default::default() });
        let all = svg.lines().filter(|line| line.starts_with("<path class=\"refused\"")).count();
        (all, svg.matches(&format!(" 0V{}\"><title>out of memory", MAP.height)).count())
    };
    assert_eq!(lines(12), (24, 12));
    assert_eq!(lines(13), (26, 0));
    assert!(lines(50_000).0 <= 2 * (WIDTH as usize + 1));
}

/// A page of many thousands of blocks must stay a page: the smallest are left out, and it says so.
#[test]
fn a_long_past_is_bounded() {
    let event = |micros, kind, address, bytes| MemoryEvent {
        micros,
        kind,
        address,
        bytes,
        requested: bytes,
        stream: 0,
        site: None,
    };
    let mut events = Vec::new();
    for i in 0..30_000 {
        let at = i % 100;
        events.push(event(2 * i, EventKind::Allocated, at * 4096, 256 + 16 * at));
        events.push(event(2 * i + 1, EventKind::Freed, at * 4096, 256 + 16 * at));
    }
    let snapshot = MemorySnapshot {
        events,
        recorded: true,
        chunks: vec![ChunkInfo { address: 0, bytes: 1 << 20 }],
        ..Default::default()
    };
    let history = History::of(&snapshot);
    let (svg, left_out) = draw(&snapshot, &history, 0);
    assert_eq!(left_out, 10_000);
    assert_eq!(rectangles(&svg, "b ").len(), RECTANGLES);
    assert!(svg.len() < 6 << 20, "{}", svg.len());
}

/// Without recording there is still a picture: of the present.
#[test]
fn the_present_alone() {
    let block = |address, state| BlockInfo { address, bytes: 1024, state, ..Default::default() };
    let snapshot = MemorySnapshot {
        chunks: vec![ChunkInfo { address: 0, bytes: 4096 }],
        blocks: vec![block(0, BlockState::Live), block(1024, BlockState::Pending), block(2048, BlockState::Free)],
        ..Default::default()
    };
    let svg = standalone(&snapshot);
    let [live] = rectangles(&svg, "b cn")[..] else { panic!("{svg}") };
    assert!((number(live, "width") - (WIDTH - 0.6)).abs() < 0.01);
    assert_eq!(svg.matches("fill=\"url(#hatch-0)\"").count(), 1);
    assert!(svg.contains("for the past, record it"));
    assert_well_formed(&svg);
    assert_well_formed(&standalone(&MemorySnapshot::default()));
}

#[test]
fn more_call_sites_than_colours_share_one() {
    let row = Row { site: None, ..Row::default() };
    assert_eq!(colour(0, &row), "cn");
    let named = super::super::site::site("zeros", 1);
    let row = Row { site: Some(&named), ..row };
    assert_eq!([colour(0, &row), colour(8, &row), colour(9, &row), colour(500, &row)], ["c0", "c8", "c9", "c9"]);
    for class in (0..=COLOURS).map(|i| format!(".c{i} {{")) {
        assert!(STYLE.contains(&class), "{class}");
    }
}

proptest! {
    // Each case is a whole page.
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn everything_stays_in_its_plot(snapshot in snapshots::any_snapshot()) {
        let svg = standalone(&snapshot);
        assert_well_formed(&svg);
        prop_assert!(!svg.contains("NaN") && !svg.contains("inf\""), "{}", svg);
        for element in rectangles(&svg, "b ").into_iter().chain(rectangles(&svg, "chunk")) {
            let (x, y) = (number(element, "x"), number(element, "y"));
            prop_assert!(x >= 0.0 && y >= -0.01);
            prop_assert!(x + number(element, "width") <= WIDTH + 0.32 && y + number(element, "height") <= MAP.height + 0.32);
        }
    }
}
