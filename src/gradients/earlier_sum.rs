//! Gradients of half types over several steps without exchange: their sums are in `f32`, apart from the buckets. In a
//! half type the sum of equal numbers stops growing at 256 (`bf16`) or 2048 (`f16`) of them.
//!
//! Invariant: while a bucket has a sum apart, the bucket itself has only the numbers of the step under way, and zeros.

use super::kernels::{self, SEGMENTS};
use super::{GradientExchange, Segment, access::exclusive, element::Gradient};
use crate::{Device, DeviceBuffer, error::Result, kernel::Float, memory::AsView};

#[derive(Default)]
pub(super) struct EarlierSum {
    /// As long as the bucket. None before the first step without exchange.
    memory: Option<DeviceBuffer<f32>>,
    pub holds: bool,
}

impl<T: Gradient> GradientExchange<T> {
    /// Whether gradients of this type are added up apart.
    pub(crate) const SUMS_IN_F32: bool = size_of::<T>() < size_of::<f32>();

    /// Takes what this step has left in the buckets into their sums.
    pub(super) fn keep(&mut self, dev: &Device) -> Result<()> {
        for bucket in 0..self.buckets() {
            if !Self::SUMS_IN_F32 || self.memory[bucket].is_empty() || !self.readiness.has_ready(bucket, &self.layout) {
                continue;
            }
            let dev = &*dev.in_order();
            for written in &self.written[bucket] {
                dev.wait(written)?;
            }
            // Lent memory stays the caller's: what is in it is added there.
            let away = |i: usize| !self.readiness.is_used(i) || self.lent[i].is_some();
            for some in self.segments(bucket, &away, &|_| false).chunks(SEGMENTS) {
                kernels::pack(dev, some, 1.0, &self.memory[bucket].view())?;
            }
            if !self.earlier_sums[bucket].holds {
                match &mut self.earlier_sums[bucket].memory {
                    Some(sum) => dev.fill(sum, 0.0)?,
                    none => *none = Some(dev.zeros(self.memory[bucket].len())?),
                }
                self.earlier_sums[bucket].holds = true;
            }
            let sum = self.earlier_sums[bucket].memory.as_ref().expect("made above");
            self.add_piece(dev, bucket, sum)?;
            dev.fill(&mut self.memory[bucket], T::zeroed())?;
        }
        Ok(())
    }

    fn add_piece(&self, dev: &Device, bucket: usize, sum: &DeviceBuffer<f32>) -> Result<()> {
        dev.axpy(self.piece, &self.widened(dev, bucket)?, &mut exclusive(sum.view()))
    }

    fn widened(&self, dev: &Device, bucket: usize) -> Result<DeviceBuffer<f32>> {
        let memory = self.memory[bucket].view();
        let wide = dev.allocate("GradientExchange", memory.len())?;
        kernels::unpack::<f32, T>(dev, &memory, (0, memory.len()), &[whole(&wide)], None)?;
        Ok(wide)
    }

    /// Before a bucket is exchanged: adds the sum of earlier steps to it, if there is one, and rounds once.
    pub(super) fn bring_sum(&self, comm: &Device, bucket: usize) -> Result<()> {
        let memory = self.memory[bucket].view();
        match &self.earlier_sums[bucket] {
            EarlierSum { memory: Some(sum), holds: true } => {
                self.add_piece(comm, bucket, sum)?;
                kernels::pack(comm, &[whole(sum)], 1.0, &memory)
            }
            // This member has had no gradient before; others have.
            _ if Self::SUMS_IN_F32 && self.piece != 1.0 && !memory.is_empty() => {
                kernels::pack(comm, &[whole(&self.widened(comm, bucket)?)], self.piece.into(), &memory)
            }
            _ => Ok(()),
        }
    }
}

fn whole(memory: &DeviceBuffer<f32>) -> Segment<'_, f32> {
    Segment { start: 0, len: memory.len(), memory: Some(memory.view()) }
}

impl<T: Gradient + Float<Acc = f32>> GradientExchange<T> {
    /// Between steps: multiplies the held sum with `held`, and the gradients of the steps to come with `piece`, if they
    /// are added up apart. (Elsewhere the caller adds them, and so multiplies them.)
    #[track_caller]
    pub(crate) fn weigh(&mut self, dev: &Device, held: f64, piece: f64) -> Result<()> {
        self.piece = piece as f32;
        if held == 1.0 {
            return Ok(());
        }
        let (dev, factor) = (&*dev.in_order(), held as f32);
        for bucket in 0..self.buckets() {
            let in_place = self.bucket(bucket).iter().any(|&gradient| self.must_add(gradient));
            match &mut self.earlier_sums[bucket] {
                EarlierSum { memory: Some(sum), holds: true } => dev.scale(sum, factor)?,
                _ if in_place => dev.scale(&mut self.memory[bucket], factor)?,
                _ => {}
            }
        }
        Ok(())
    }
}
