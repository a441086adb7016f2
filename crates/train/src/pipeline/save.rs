//! Checkpoints of a [`Pipeline`]: the tensors of each stage, behind `stage0.` and so on.

use super::{Pipeline, Stage};
use crate::Checkpoint;
use crate::runtime::{OpSite, PerDeviceInternals};
use gpu_pool::{Device, Result};
use std::path::Path;

impl<S: Stage + 'static> Pipeline<S> {
    /// Writes the entries that `f` puts into a checkpoint for each stage: [`checkpoint`](Self::checkpoint) and
    /// [`Checkpoint::save`]. Errors: those of both.
    #[track_caller]
    pub fn save(
        &mut self,
        path: impl AsRef<Path>,
        f: impl Fn(&Device, usize, &mut S, &mut Checkpoint) -> Result<()> + Sync,
    ) -> Result<()> {
        let _here = OpSite::here("Pipeline::save");
        self.checkpoint(f)?.save(path)
    }

    /// Reads a file of [`save`](Self::save): [`Checkpoint::load`] and [`restore`](Self::restore). Errors: of both.
    #[track_caller]
    pub fn load(
        &mut self,
        path: impl AsRef<Path>,
        f: impl Fn(&Device, usize, &mut S, &Checkpoint) -> Result<()> + Sync,
    ) -> Result<()> {
        let _here = OpSite::here("Pipeline::load");
        self.restore(&Checkpoint::load(path)?, f)
    }

    /// A checkpoint of all stages. `f` puts the tensors of a stage into a checkpoint of its own; collectives are
    /// allowed. In the whole their names begin with `stage0.` and so on, so it does not depend on how stages lie on
    /// devices. Of several pipelines it has the entries of the first one.
    ///
    /// It has the stages of this process: in a pipeline of several processes each saves its own, in a file of its own.
    ///
    /// The page "Checkpoints" of the guide has an example.
    ///
    /// Errors: as [`each`](Self::each).
    #[track_caller]
    pub fn checkpoint(
        &mut self,
        f: impl Fn(&Device, usize, &mut S, &mut Checkpoint) -> Result<()> + Sync,
    ) -> Result<Checkpoint> {
        let _here = OpSite::here("Pipeline::checkpoint");
        let sections = self.each(|dev, stage, own| {
            let mut section = Checkpoint::new();
            f(dev, stage, own, &mut section)?;
            Ok((stage, section))
        })?;
        let mut all = Checkpoint::new();
        for (stage, section) in sections.into_iter().rev() {
            all.insert_section(&format!("stage{stage}."), section);
        }
        Ok(all)
    }

    /// Gives each stage its part of a [`checkpoint`](Self::checkpoint), without the `stage0.`, and clears a failure
    /// ([`Error::Poisoned`](gpu_pool::Error::Poisoned)). `f` takes over all that a stage has. Errors: as
    /// [`each`](Self::each); after an error the stages are poisoned.
    #[track_caller]
    pub fn restore(
        &mut self,
        checkpoint: &Checkpoint,
        f: impl Fn(&Device, usize, &mut S, &Checkpoint) -> Result<()> + Sync,
    ) -> Result<()> {
        let _here = OpSite::here("Pipeline::restore");
        let section = |stage| checkpoint.section(&format!("stage{stage}."));
        let restored = self.stages.accepting(None, |dev, _, stages| {
            let one = |(stage, own): &mut (usize, S)| f(dev, *stage, own, &section(*stage));
            OpSite::outside(|| stages.own.iter_mut().try_for_each(one)).map(|()| ((), true))
        });
        restored.map(drop)
    }
}
