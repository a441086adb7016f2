//! Equal replicas: members begin with the same parameters, check that they still have them, and end together.

use super::{Difference, GradientExchange, difference::mismatch, element::Gradient};
use crate::{
    DType, Device, Element, Group,
    error::{Result, Site, op_site::OpSite},
    fabric::{Call, Origin},
    memory::{AsView, AsViewMut, DeviceView, DeviceViewMut},
};
use std::{
    hash::{DefaultHasher, Hasher},
    sync::Arc,
};

#[derive(Clone)]
struct Parameters {
    dtype: DType,
    sizes: Arc<[usize]>,
    /// Checksums; empty if only the sizes are compared.
    sums: Arc<[u64]>,
    site: Site,
}

impl Parameters {
    fn differs(&self, other: &Self) -> Option<Difference> {
        let both = |what, text: &dyn Fn(&Self) -> String| Some((what, text(self), text(other)));
        if self.dtype != other.dtype {
            return both("dtype", &|own| format!("parameters of {:?}", own.dtype));
        }
        if self.sizes.len() != other.sizes.len() {
            return both("count", &|own| format!("{} parameters", own.sizes.len()));
        }
        if let Some(i) = (0..self.sizes.len()).find(|&i| self.sizes[i] != other.sizes[i]) {
            return both("size", &|own| format!("parameter {i} of {} elements", own.sizes[i]));
        }
        let i = (0..self.sums.len().min(other.sums.len())).find(|&i| self.sums[i] != other.sums[i])?;
        both("parameters", &|own| format!("parameter {i}, whose bits have the checksum {:016x}", own.sums[i]))
    }

    fn compare(self, group: &Group<'_>) -> Result<()> {
        let (here, site) = (group.here(), self.site);
        let text = format!("parameters of {:?}, {:?}, with the checksums {:x?}", self.dtype, self.sizes, self.sums);
        let all = here.exchange(self)?;
        for rank in 1..all.len() {
            if let Some(difference) = all[0].differs(&all[rank]) {
                return Err(mismatch(&here, rank, difference, [all[0].site, all[rank].site]));
            }
        }
        group.agree(Origin::default(), "parameters", site, &text)
    }
}

impl<T: Gradient> GradientExchange<T> {
    /// For members with different numbers of batches: before each step a member says whether it has a batch, and learns
    /// how many members do. At 0 all of them stop together. Until then a member without a batch calls
    /// [`nothing`](Self::nothing), still [`finish`](Self::finish)es the step, and updates its weights with the others'
    /// gradients, so that all weights stay equal. Costs one meeting of the host threads.
    ///
    /// `Avg` divides by the number of all members, and missing gradients count as zero. For an average over the members
    /// that have a batch use `Scaled`, with [`set_weight`](Self::set_weight) of one over the number returned here. (In
    /// DDP's `join`, members that have ended shadow the others' collectives, and the last member's weights are
    /// broadcast at the end.) The page "Gradients" of the guide has such a loop.
    ///
    /// `InvalidArgument` within a step, in a capture and after a failure; `Mismatch`, `Timeout`, `Aborted`.
    #[track_caller]
    pub fn join(&mut self, dev: &Device, has_batch: bool) -> Result<usize> {
        let _here = OpSite::here("join");
        self.check(dev, "join")?;
        self.between_steps("join")?;
        let group = self.group(dev, "join")?;
        if group.spans_processes() {
            let call = Call::new("join").from(self.origin());
            let all = group.exchange_bytes(&call, vec![has_batch.into()])?;
            return Ok(all.iter().filter(|member| member[..] == [1]).count());
        }
        let all = group.exchange_from(self.origin(), Joins(has_batch))?;
        Ok(all.iter().filter(|member| member.0).count())
    }

    /// Gives all members the parameters of member `root`, so that they begin with the same ones. It also works for
    /// other data of a model, such as running means, at any time, and for every type that collectives know, not only
    /// those of gradients. (DDP does this when it is made, and with `broadcast_buffers` in each step.)
    ///
    /// [`Mismatch`](crate::Error::Mismatch) on all members, before anything was written, if they differ in the number
    /// of parameters, their lengths or their type; `InvalidArgument` for a root that is no member, in a capture, and in
    /// a gang without one of the members; else the errors of [`Device::broadcast`].
    #[track_caller]
    pub fn broadcast_parameters<V>(&self, dev: &Device, parameters: &mut [V], root: usize) -> Result<()>
    where
        V: AsViewMut,
        V::Elem: Element,
    {
        let _here = OpSite::here("broadcast_parameters");
        let group = self.here(dev, "broadcast_parameters")?;
        dev.not_in_graph("broadcast_parameters")?;
        // Checked also if there is nothing to broadcast.
        group.check_root("broadcast_parameters", root)?;
        // The compared views are the written ones.
        let mut views: Vec<DeviceViewMut<'_, V::Elem>> = parameters.iter_mut().map(|x| x.view_mut()).collect();
        let sizes = views.iter().map(|x| x.len()).collect();
        let (dtype, sums, site) = (V::Elem::DTYPE, Arc::default(), OpSite::place());
        Parameters { dtype, sizes, sums, site }.compare(&group)?;
        for x in &mut views {
            group.broadcast(x, root)?;
        }
        Ok(())
    }

    /// Checks that all members have the same parameters, bit for bit. Replicas that drift apart give no error by
    /// themselves, only worse results. It downloads all parameters and waits: call it every thousandth step or so.
    ///
    /// [`Mismatch`](crate::Error::Mismatch) on all members: `"parameters"` with the number of the first that differs
    /// between rank 0 and another, or as in [`broadcast_parameters`](Self::broadcast_parameters); else the errors of
    /// [`Device::download`].
    #[track_caller]
    pub fn verify_parameters<V>(&self, dev: &Device, parameters: &[V]) -> Result<()>
    where
        V: AsView,
        V::Elem: Element,
    {
        let _here = OpSite::here("verify_parameters");
        let group = self.here(dev, "verify_parameters")?;
        dev.not_in_graph("verify_parameters")?;
        let views: Vec<DeviceView<'_, V::Elem>> = parameters.iter().map(|x| x.view()).collect();
        let mut sums = Vec::with_capacity(views.len());
        for x in &views {
            let mut hasher = DefaultHasher::new();
            hasher.write(bytemuck::cast_slice(&dev.download(x)?));
            sums.push(hasher.finish());
        }
        let sizes = views.iter().map(|x| x.len()).collect();
        let (dtype, sums, site) = (V::Elem::DTYPE, sums.into(), OpSite::place());
        Parameters { dtype, sizes, sums, site }.compare(&group)
    }
}

/// The message of a member in [`GradientExchange::join`]. Its own type: no other exchange of values matches it.
#[derive(Clone)]
struct Joins(bool);
