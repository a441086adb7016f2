//! Results of other machines, kept as JSON: written by `--json`, read for the page.

use crate::find::Findings;
use anyhow::{Context, Result, ensure};
use gpu_pool::GpuPool;
use serde_json::{Map, Value, json};
use std::path::Path;

/// The results of two H200s, for the page.
pub const H200: &str = "benches/results/2xH200/bug_zoo.json";

pub fn write(all: &[Findings], cuda: bool) -> Result<String> {
    let builder = GpuPool::builder();
    let pool = if cuda { builder.cuda().devices(&[0, 1]) } else { builder.host(2) }.build()?;
    let device = pool.report().devices[0].name.clone();
    let row = |f: &Findings| {
        let row = json!({
            "off": f.off.how, "on": f.on.how, "mended": f.right.how, "as_expected": f.as_expected(),
            "report": f.on.text,
        });
        (f.exhibit.name.to_owned(), row)
    };
    let exhibits: Map<String, Value> = all.iter().map(row).collect();
    let all =
        json!({ "backend": if cuda { "cuda" } else { "host" }, "device": device, "devices": 2, "exhibits": exhibits });
    Ok(serde_json::to_string_pretty(&all)? + "\n")
}

/// The rows of a file with results of H200s, if it is there.
pub fn read(path: impl AsRef<Path>) -> Result<Option<Map<String, Value>>> {
    let path = path.as_ref();
    if !path.exists() {
        return Ok(None);
    }
    let shown = || path.display().to_string();
    let all: Value = serde_json::from_str(&std::fs::read_to_string(path).with_context(shown)?).with_context(shown)?;
    let h200 = all["backend"] == "cuda" && all["device"].as_str().is_some_and(|name| name.contains("H200"));
    ensure!(h200, "{}: these are results of {}, not of H200s", path.display(), all["device"]);
    all["exhibits"].as_object().cloned().with_context(|| format!("{}: no `exhibits`", path.display())).map(Some)
}

/// A cell of a row.
pub fn cell(rows: &Map<String, Value>, name: &str, column: &str) -> String {
    rows.get(name).and_then(|row| row[column].as_str()).unwrap_or("not recorded").to_owned()
}
