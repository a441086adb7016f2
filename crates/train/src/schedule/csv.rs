//! PyTorch's CSV files of schedules, in both directions.
//!
//! PyTorch's `_dump_csv` and `_load_csv`: a line for each rank, a cell for each action, an empty cell for an idle slot.

use super::action::{Fields, number};
use super::error::at_caller;
use super::{Action, Checked, OpSite, PipelineSchedule, Result, ScheduleError};

impl PipelineSchedule {
    /// Reads a schedule from PyTorch's CSV form: line `r + 1` holds the actions of rank `r`.
    ///
    /// * `2F0`, `1B3`, `2I0` and `0W0` are [`Action`]s. Space around them does not matter.
    /// * Empty cells are idle slots. They are skipped, since the times follow from the order.
    /// * `(0F1;3B0)OVERLAP_F_B` holds actions that PyTorch lets overlap. They become single actions, in this order.
    /// * Transfers (`0SEND_F0`, `1RECV_F0`, `1SEND_B0`, `0RECV_B0`) are skipped: they follow from the other actions.
    ///   `0UNSHARD`, `0RESHARD` and `0REDUCE_GRAD` are skipped: they concern sharded parameters, not the order of the
    ///   pipeline. So files of PyTorch's `compute_comms` form can be read, too.
    /// * Any other cell is an error.
    ///
    /// Old versions of PyTorch (2024) wrote `B` for the gradient of the input, and `BW` for the whole backward pass.
    /// Such files are errors here. Replace `BW` by `X`, then `B` by `I`, then `X` by `B`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](gpu_pool::Error::InvalidArgument), which names line and column of a cell that is none
    /// of these; otherwise as for [`new`](Self::new).
    ///
    /// ```
    /// use gpu_pool_train::PipelineSchedule;
    ///
    /// let schedule = PipelineSchedule::from_csv("0F0,0F1,,0B0,0B1\n,1F0,1B0,1F1,1B1\n")?;
    /// assert_eq!(schedule.to_csv(), "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n");
    ///
    /// let wrong = PipelineSchedule::from_csv("0F0,0B0\n1F0,1G0\n").unwrap_err();
    /// let why = "line 2, column 2: `1G0` is not an action such as 2F0: the part after the stage is none of";
    /// assert!(wrong.to_string().contains(why));
    /// # Ok::<(), gpu_pool::Error>(())
    /// ```
    #[track_caller]
    pub fn from_csv(text: &str) -> Result<Self> {
        let _here = OpSite::here("PipelineSchedule::from_csv");
        at_caller(Self::read_csv(text))
    }

    pub(super) fn read_csv(text: &str) -> Checked<Self> {
        // Spreadsheet programs start a file with a byte order mark.
        let lines = text.trim_start_matches('\u{feff}').trim_end().lines();
        let ranks = lines.enumerate().map(|(rank, line)| {
            let mut actions = Vec::new();
            for (column, cell) in line.split(',').map(str::trim).enumerate() {
                let unreadable = |why| ScheduleError::unreadable(cell, (rank + 1, column + 1), why);
                read(cell, &mut actions).map_err(unreadable)?;
            }
            Ok(actions)
        });
        Self::check(ranks.collect::<Checked<_>>()?)
    }

    /// Writes PyTorch's CSV form: a line for each rank, without idle slots. [`from_csv`](Self::from_csv) reads it back.
    pub fn to_csv(&self) -> String {
        let line = |list: &Vec<Action>| list.iter().map(Action::to_string).collect::<Vec<_>>().join(",") + "\n";
        self.actions.iter().map(line).collect()
    }
}

fn read(cell: &str, actions: &mut Vec<Action>) -> std::result::Result<(), &'static str> {
    if cell.is_empty() {
        return Ok(());
    }
    if let Some(rest) = cell.strip_prefix('(') {
        let inner = rest.strip_suffix(")OVERLAP_F_B").ok_or("a cell with `(` does not end with `)OVERLAP_F_B`")?;
        for action in inner.split(';').map(str::trim) {
            actions.push(Fields::split(action)?.action()?);
        }
        return Ok(());
    }
    let fields = Fields::split(cell)?;
    match fields.word {
        "SEND_F" | "RECV_F" | "SEND_B" | "RECV_B" => number(fields.micro).map(drop),
        "UNSHARD" | "RESHARD" | "REDUCE_GRAD" if fields.micro.is_empty() => Ok(()),
        _ => {
            actions.push(fields.action()?);
            Ok(())
        }
    }
}
