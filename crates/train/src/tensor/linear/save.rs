//! Checkpoints of the linear layers.

use super::{ColumnLinear, RowLinear};
use crate::checkpoint::{Checkpoint, Cut, named};
use crate::runtime::OpSite;
use gpu_pool::{Element, Group, Result, kernel::Float};

/// Checkpoints of a layer. Which sides of weight and bias are cut, if any.
macro_rules! checkpoints {
    ($($layer:ident: $weight:expr, $bias:expr;)+) => {$(
        impl<T: Float + Element> $layer<T> {
            /// How weight and bias lie on the group's devices: for [`Checkpoint::insert_part`], and optimizers' state.
            pub fn cuts(&self) -> [Cut; 2] {
                let (inputs, outputs) = self.part.shape();
                let cut = |side: Option<usize>, shape: &[usize]| match side {
                    Some(side) => Cut::along(side, shape),
                    None => Cut::whole(shape),
                };
                [cut($weight, &[inputs, outputs]), cut($bias, &[outputs])]
            }

            /// Puts the whole layer into the checkpoint of rank 0, as `name.weight` and `name.bias`. All members of the
            /// group call it, each with a checkpoint of its own, and it **waits**. Errors: those of
            /// [`Checkpoint::insert_part`].
            #[track_caller]
            pub fn save(&self, group: &Group<'_>, to: &mut Checkpoint, name: &str) -> Result<()> {
                let _here = OpSite::here(concat!(stringify!($layer), "::save"));
                let [weight, bias] = self.cuts();
                to.insert_part(group, &named(name, "weight"), &weight, &self.part.weight)?;
                to.insert_part(group, &named(name, "bias"), &bias, &self.part.bias)
            }

            /// Takes this member's part of the entries of [`save`](Self::save), also on another number of devices. All
            /// members of the group call it with the same checkpoint. Errors: those of [`Checkpoint::part`] and
            /// [`Device::upload_into`](gpu_pool::Device::upload_into).
            #[track_caller]
            pub fn load(&mut self, group: &Group<'_>, from: &Checkpoint, name: &str) -> Result<()> {
                let _here = OpSite::here(concat!(stringify!($layer), "::load"));
                let [weight, bias] = self.cuts();
                let weight = from.part::<T>(group, &named(name, "weight"), &weight)?;
                let bias = from.part::<T>(group, &named(name, "bias"), &bias)?;
                group.device().upload_into(&weight, &mut self.part.weight)?;
                group.device().upload_into(&bias, &mut self.part.bias)
            }
        }
    )+};
}
checkpoints! {
    ColumnLinear: Some(1), Some(0);
    RowLinear: Some(0), None;
}
