//! The table of results: which mistake is caught where, with and without the checker.

use crate::{
    find::{Findings, SEEDS},
    tour::paragraph,
};
use anyhow::Result;
use comfy_table::{ColumnConstraint, ContentArrangement, Table, TableComponent, presets};
use std::io::Write;

pub fn write(out: &mut impl Write, all: &[Findings], cuda: bool) -> Result<()> {
    let devices = if cuda { "CUDA" } else { "software GPUs" };
    let mut table = Table::new();
    table
        .load_preset(presets::UTF8_HORIZONTAL_ONLY)
        .remove_style(TableComponent::HorizontalLines)
        .remove_style(TableComponent::MiddleIntersections)
        .set_content_arrangement(ContentArrangement::Dynamic)
        .set_width(crate::width());
    let mut head =
        vec!["exhibit".to_owned(), "checker off".to_owned(), "checker on".to_owned(), "mended twin".to_owned()];
    if !cuda {
        head.insert(2, format!("wrong of {SEEDS}"));
    }
    table.set_header(head);
    for found in all {
        let [off, on, right] = [&found.off, &found.on, &found.right]
            .map(|f| if f.as_expected { f.how.clone() } else { format!("UNEXPECTED: {}", f.how) });
        let mut row = vec![found.exhibit.name.to_owned(), off, on, right];
        if !cuda {
            row.insert(2, found.wrong_numbers.map_or_else(|| "-".to_owned(), |n| n.to_string()));
        }
        table.add_row(row);
    }
    // Names are arguments of `--only`: never wrapped.
    if let Some(names) = table.column_mut(0) {
        names.set_constraint(ColumnConstraint::ContentWidth);
    }
    writeln!(out, "On {devices}:\n{table}")?;
    if !cuda {
        let head = format!("wrong of {SEEDS}: ");
        paragraph(out, &head, "orders of its operations in which it ends in silence, with wrong numbers", 0)?;
    }
    Ok(())
}
