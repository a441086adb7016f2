//! One file with all of it, for a browser: nothing is fetched, nothing is needed, and nothing a program names can become
//! part of the page's own code.

use super::{
    HOW_TO_RECORD,
    classes::MemoryClasses,
    lifetime::{History, Row},
    markup::Escaped,
    picture,
    site::Name,
    snapshot::MemorySnapshot,
    units::{Bytes, Micros},
};
use crate::memory::stats::MemoryStats;
use std::fmt::{self, Write};

const STYLE: &str = include_str!("page/page.css");
const SCRIPT: &str = include_str!("page/page.js");

/// The page of some devices.
pub(crate) fn page(devices: &[MemorySnapshot]) -> String {
    let mut out = String::new();
    write(&mut out, devices).expect("a string takes all text");
    out
}

fn write(out: &mut String, devices: &[MemorySnapshot]) -> fmt::Result {
    let title = match devices {
        [only] => format!("Memory of device {}", only.device),
        _ => format!("Memory of {} devices", devices.len()),
    };
    write!(
        out,
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta name=\"viewport\" \
         content=\"width=device-width, initial-scale=1\">\n<title>{title}</title>\n<style>\n{STYLE}{}</style>\n</head>\n\
         <body>\n<h1>{title}</h1>\n",
        picture::STYLE
    )?;
    out.push_str(
        "<p>Addresses from bottom to top, holes left out; events from left to right, evenly spaced. A rectangle is a block, \
         coloured by who asked for it. Hatched: freed, but still used by queued work. Drag over a time for a closer look, \
         double-click for all of it.</p>\n",
    );
    for (index, snapshot) in devices.iter().enumerate() {
        let history = History::of(snapshot);
        // By index: nobody keeps a caller from giving one device twice.
        writeln!(out, "<section id=\"device-{index}\">")?;
        if devices.len() > 1 {
            writeln!(out, "<h2>Device {}</h2>", snapshot.device)?;
        }
        about(out, snapshot)?;
        tiles(out, &snapshot.stats)?;
        let (picture, left_out) = picture::draw(snapshot, &history, index);
        writeln!(out, "<figure>\n{picture}")?;
        if left_out > 0 {
            writeln!(out, "<figcaption>The {left_out} smallest rectangles are not drawn.</figcaption>")?;
        }
        writeln!(out, "</figure>")?;
        sites(out, &history)?;
        classes(out, &snapshot.classes())?;
        writeln!(out, "</section>")?;
    }
    write!(out, "<script>\n{SCRIPT}</script>\n</body>\n</html>\n")
}

fn about(out: &mut String, snapshot: &MemorySnapshot) -> fmt::Result {
    write!(out, "<p>Taken {} after the pool was built", Micros(snapshot.taken_at))?;
    match (snapshot.recorded, snapshot.dropped_events) {
        (false, _) => write!(out, "; call sites and the past are recorded with {}", Escaped(HOW_TO_RECORD))?,
        (true, 0) => write!(out, "; all {} events", snapshot.events.len())?,
        (true, older) => write!(out, "; the latest {} events, {older} older ones were dropped", snapshot.events.len())?,
    }
    writeln!(out, ".</p>")
}

fn tiles(out: &mut String, stats: &MemoryStats) -> fmt::Result {
    let rounding = 100.0 * stats.in_use.saturating_sub(stats.requested) as f64 / stats.in_use.max(1) as f64;
    let shown: [(&str, String, String); 8] = [
        ("in use", Bytes(stats.in_use).to_string(), format!("at most {}", Bytes(stats.peak))),
        ("asked for", Bytes(stats.requested).to_string(), format!("{rounding:.1} % lost to rounding")),
        ("reserved", Bytes(stats.reserved).to_string(), format!("at most {}", Bytes(stats.peak_reserved))),
        ("pending", Bytes(stats.pending).to_string(), "freed, still used".to_owned()),
        ("allocations", stats.allocations.to_string(), format!("{} beyond the own lists", stats.ladder)),
        ("driver calls", stats.driver_calls.to_string(), format!("{} slabs", stats.slabs)),
        ("from another stream", stats.steals.to_string(), format!("{} with a wait", stats.waits)),
        ("freed by another thread", stats.remote_frees.to_string(), String::new()),
    ];
    writeln!(out, "<dl>")?;
    for (name, value, more) in shown {
        writeln!(out, "<div><dt>{name}</dt><dd>{value} <small>{more}</small></dd></div>")?;
    }
    writeln!(out, "</dl>")
}

fn sites(out: &mut String, history: &History) -> fmt::Result {
    if history.sites.is_empty() {
        return Ok(());
    }
    let mut order: Vec<(usize, &Row)> = history.sites.iter().enumerate().collect();
    // What holds memory now comes first; what comes after is in the order of its peak already.
    order.sort_by_key(|(_, row)| std::cmp::Reverse(row.live_bytes));
    let most = order[0].1.live_bytes.max(1);
    out.push_str(
        "<h3>Who holds it</h3>\n<div class=\"wide\"><table>\n<thead><tr><th>call site</th><th>live bytes</th><th>buffers</th>\
         <th>at most</th><th>allocations seen</th><th>freed by others</th></tr></thead>\n<tbody>\n",
    );
    for (index, row) in order {
        let (colour, name) = (picture::colour(index, row), Escaped(Name(row.site)));
        let Row { live_blocks, live_bytes, peak, allocations, remote_frees, .. } = row;
        writeln!(
            out,
            "<tr data-site=\"{index}\" tabindex=\"0\"><td><span class=\"swatch {colour}\"></span><code>{name}</code></td>\
             <td>{}<span class=\"share\"><span style=\"width:{:.1}%\"></span></span></td><td>{live_blocks}</td><td>{}</td><td>{allocations}</td>\
             <td>{remote_frees}</td></tr>",
            Bytes(*live_bytes),
            *live_bytes as f64 / most as f64 * 100.0,
            Bytes(*peak)
        )?;
    }
    writeln!(out, "</tbody>\n</table></div>")
}

fn classes(out: &mut String, MemoryClasses { classes }: &MemoryClasses) -> fmt::Result {
    if classes.is_empty() {
        return Ok(());
    }
    out.push_str(
        "<h3>Small blocks</h3>\n<div class=\"wide\"><table class=\"narrow\">\n<thead><tr><th>block</th><th>live</th>\
         <th>free</th><th>pending</th></tr></thead>\n<tbody>\n",
    );
    for class in classes {
        let (bytes, live, free, pending) = (Bytes(class.bytes), class.live, class.free, class.pending);
        writeln!(out, "<tr><td>{bytes}</td><td>{live}</td><td>{free}</td><td>{pending}</td></tr>")?;
    }
    writeln!(out, "</tbody>\n</table></div>")
}

#[cfg(test)]
mod tests {
    use super::{
        super::{markup::assert_well_formed, snapshot::tests as snapshots},
        *,
    };
    use proptest::prelude::*;

    #[test]
    fn a_page_is_whole_and_needs_nothing_else() {
        let page = page(&[snapshots::example(), MemorySnapshot::default()]);
        assert_well_formed(&page);
        // The one address in it names what kind of element a script makes; nothing is fetched.
        let page = page.replacen("http://www.w3.org/2000/svg", "", 1);
        for outside in ["http:", "https:", "//cdn", "src=", "href=", "@import", "@font-face", "fetch(", "import("] {
            assert!(!page.contains(outside), "{outside}");
        }
        assert_eq!(page.matches("<figure>").count(), 2);
        assert!(page.contains("the latest 8 events, 3 older ones were dropped"));
        assert!(page.contains(HOW_TO_RECORD), "of the device that was not recorded");
    }

    /// File names may be anything; so may what a JSON file says.
    #[test]
    fn names_do_not_become_code() {
        let mut snapshot = snapshots::example();
        let evil = "</title></script><script>alert(1)</script><img src=x onerror=\"alert(2)\">&amp;";
        for site in snapshot.events.iter_mut().filter_map(|event| event.site.as_mut()) {
            site.file = evil.into();
        }
        let page = page(&[snapshot]);
        assert_well_formed(&page);
        assert_eq!(page.matches("<script>").count(), 1);
        assert!(!page.contains("<img") && page.contains("&lt;img src=x"));
        assert!(page.contains("Vec&lt;f32&gt;::zeros &amp; co &quot;quoted&quot;"));
    }

    #[test]
    fn the_largest_holder_is_the_first_row() {
        let page = page(&[snapshots::example()]);
        let rows: Vec<&str> = page.split("<tr data-site=").skip(1).collect();
        assert_eq!(rows.len(), 3);
        assert!(rows[0].contains("zeros") && rows[0].contains("4.0 MiB"), "{}", rows[0]);
        assert!(rows[2].contains("upload") && rows[2].contains("<td>18.0 MiB</td>"), "{}", rows[2]);
        // The colour is that of the rectangles.
        assert!(rows[2].starts_with("\"0\"") && rows[2].contains("swatch c0") && page.contains("class=\"b c0 s0\""));
    }

    #[test]
    fn classes_are_shown_where_there_are_any() {
        let mut snapshot = snapshots::example();
        assert!(!page(&[snapshot.clone()]).contains("Small blocks"));
        snapshot.blocks[0].class = Some(256);
        assert!(page(&[snapshot]).contains("<tr><td>256 B</td><td>1</td><td>0</td><td>0</td></tr>"));
    }

    proptest! {
        // Each case is a whole page.
        #![proptest_config(ProptestConfig::with_cases(48))]

        #[test]
        fn any_snapshot_makes_a_page(snapshots in prop::collection::vec(snapshots::any_snapshot(), 0..3)) {
            assert_well_formed(&page(&snapshots));
        }
    }
}
