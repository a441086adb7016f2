//! The text picture of a schedule.

use super::{Costs, PipelineSchedule};
use std::{
    fmt::{self, Write},
    time::Duration,
};

/// A diagram: a row for each rank, time from left to right. F, I and W take one column, B takes two, a hop takes none.
/// Dashes fill the second column of a B; blank columns are idle. The last line sums up.
///
/// ```
/// use gpu_pool_train::PipelineSchedule;
///
/// let diagram = "\
/// rank 0 |0F0 0F1         0B0---- 0F2 0B1----     0B2----|
/// rank 1 |    1F0 1B0---- 1F1 1B1---- 1F2 1B2----        |
/// 2 ranks, 2 stages, 3 micro-batches; bubble 25.0 %; saved activations at most 2, 1";
/// assert_eq!(PipelineSchedule::one_f_one_b(2, 3)?.to_string(), diagram);
/// # Ok::<(), gpu_pool::Error>(())
/// ```
impl fmt::Display for PipelineSchedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const COLUMN: Duration = Duration::from_secs(1);
        let unit = Costs { forward: COLUMN, backward_input: COLUMN, backward_weights: COLUMN, hop: Duration::ZERO };
        // A schedule is runnable, and MAX_ACTIONS seconds fit in a `Duration`.
        let timeline = self.simulate(unit).map_err(|_| fmt::Error)?;
        let column = |time: Duration| time.as_secs() as usize;
        let label = self.actions.iter().flatten().map(|action| action.to_string().len()).max().unwrap_or(0);
        let width = label + 1;
        let all = column(timeline.end);
        let digits = (self.ranks() - 1).to_string().len();
        for (rank, spans) in timeline.spans.iter().enumerate() {
            write!(f, "rank {rank:<digits$} |")?;
            let mut at = 0;
            for span in spans {
                let (start, end) = (column(span.start), column(span.end));
                fill(f, ' ', (start - at) * width)?;
                let text = span.action.to_string();
                f.write_str(&text)?;
                let busy = (end - start) * width - 1;
                fill(f, if end - start > 1 { '-' } else { ' ' }, busy - text.len())?;
                f.write_str(if end == all { "" } else { " " })?;
                at = end;
            }
            fill(f, ' ', ((all - at) * width).saturating_sub(1))?;
            f.write_str("|\n")?;
        }
        let kept = timeline.in_flight.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
        write!(f, "{}, {}, ", count(self.ranks(), "rank"), count(self.stages(), "stage"))?;
        write!(f, "{}; bubble {:.1} %; ", count(self.micros, "micro-batch"), 100.0 * timeline.bubble)?;
        write!(f, "saved activations at most {kept}")
    }
}

fn fill(f: &mut fmt::Formatter<'_>, character: char, times: usize) -> fmt::Result {
    (0..times).try_for_each(|_| f.write_char(character))
}

fn count(number: usize, name: &str) -> String {
    let ending = match number {
        1 => "",
        _ if name.ends_with("ch") => "es",
        _ => "s",
    };
    format!("{number} {name}{ending}")
}
