//! The end of a step whose state is divided among the members: all scattered buckets together, by one kernel of each
//! member. It adds up all squares, updates the parameters of the own parts, and writes them to all members. In a graph
//! it also adds up the gradients.
//! [`replica`](super::replica) uses it where [`Together::new`] gives one; elsewhere it calls [`parts`](super::parts).
//! Invariant: both give the same bits. They differ only in what buckets hold afterwards.

use super::parts::chunks;
use crate::runtime::{
    Access, CHUNK, Call, DeviceInternals, ErrorInternals, ExchangeInternals, Extent, GroupInternals, Layout, area,
};
use crate::sharded::kernels::{self, Buckets, words};
use crate::update::{Moments, Parameter, Rule};
use gpu_pool::{AsView, AsViewMut, Device, DeviceBuffer, DeviceView, Error, Result, gradients::GradientExchange};
use std::{marker::PhantomData, ops::Range, sync::Arc};

type Address = u64;

const OP: &str = "sharded_step";

pub(super) struct Together {
    /// Where the members were told that the own parameters are, and behind these the buckets.
    told: Arc<[Address]>,
    /// The table of the kernel, and what is in it: addresses change seldom.
    pieces: DeviceBuffer<u64>,
    table: Vec<u64>,
    own: usize,
    largest: usize,
    chunks: usize,
}

/// A member's part of a bucket: where both moments and the parameters in `f32` of the part are (0: none).
#[derive(Debug)]
struct Own {
    part: Range<usize>,
    state: [Address; 3],
}

/// The table for these parts of all buckets. `told`: what each member has told; `size`: of an element.
fn table(layout: &Layout, own: &[Own], told: &[Arc<[Address]>], size: usize) -> Vec<u64> {
    let mut words = Vec::new();
    // Chunks of the buckets before: this member's, and all.
    let (mut mine, mut all) = (0, 0);
    for (number, (bucket, Own { part, state })) in layout.buckets.iter().zip(own).enumerate() {
        for &parameter in &bucket.gradients {
            let extent = layout.extents[parameter];
            let (start, end) = (extent.start.max(part.start), extent.range().end.min(part.end));
            if start >= end {
                continue;
            }
            let at = start - part.start;
            words.extend([mine * CHUNK + at, end - start, all + part.start / CHUNK - mine].map(|x| x as u64));
            words.extend(state.map(|state| if state == 0 { 0 } else { state + (at * size_of::<f32>()) as u64 }));
            let address = |i: usize, at: usize| told.iter().map(move |told| told[i] + (at * size) as u64);
            words.extend(address(layout.extents.len() + number, start));
            words.extend(address(parameter, start - extent.start));
        }
        mine += part.len().div_ceil(CHUNK);
        all += bucket.len.div_ceil(CHUNK);
    }
    words
}

fn pieces(layout: &Layout, parts: &[Range<usize>]) -> usize {
    let of = |extent: &&Extent| {
        let (own, part) = (extent.range(), &parts[extent.bucket]);
        own.start.max(part.start) < own.end.min(part.end)
    };
    layout.extents.iter().filter(of).count()
}

impl Together {
    /// None where kernels cannot wait for each other or buckets are not scattered. All members get the same answer.
    pub fn new<T: Parameter>(dev: &Device, exchange: &GradientExchange<T>) -> Result<Option<Together>> {
        let (group, buckets) = (exchange.group(dev, OP)?, 0..exchange.buckets());
        let all = buckets.clone().map(|bucket| chunks(exchange, bucket)).sum();
        if !exchange.is_scattered() || group.count() < 2 || all == 0 || !group.kernels_meet() {
            return Ok(None);
        }
        // Not later: to load a module may wait for kernels that wait for this member.
        dev.load(kernels::entry_of_buckets::<T>())?;
        let chunks_of = |rank: usize| -> usize {
            buckets.clone().map(|bucket| exchange.part_of(bucket, rank).len().div_ceil(CHUNK)).sum()
        };
        let parts: Vec<_> = buckets.clone().map(|bucket| exchange.part(bucket)).collect();
        Ok(Some(Together {
            pieces: dev.zeros(pieces(exchange.layout(), &parts) * words(group.count()))?,
            table: Vec::new(),
            told: Arc::default(),
            own: chunks_of(group.rank()),
            largest: (0..group.count()).map(chunks_of).max().unwrap_or(0),
            chunks: all,
        }))
    }

    /// Tells all members where the parameters and buckets are. All call it before each [`update`](Self::update).
    pub fn prepare<T: Parameter>(
        &mut self,
        dev: &Device,
        exchange: &GradientExchange<T>,
        moments: &[Moments<'_>],
        parameters: &[&mut DeviceBuffer<T>],
    ) -> Result<()> {
        let buckets = (0..exchange.buckets()).map(|bucket| exchange.memory(bucket).address());
        self.told = parameters.iter().map(|parameter| parameter.view().address()).chain(buckets).collect();
        let all = exchange.group(dev, OP)?.exchange_from(exchange.origin(), self.told.clone())?;
        let address = |memory: Option<DeviceView<'_, f32>>| memory.map_or(0, |memory| memory.address());
        let own = |(bucket, moments): (usize, &Moments<'_>)| Own {
            part: exchange.part(bucket),
            state: moments.kept.map(address),
        };
        let own: Vec<Own> = moments.iter().enumerate().map(own).collect();
        let table = table(exchange.layout(), &own, &all, size_of::<T>());
        if table != self.table {
            // If this fails, nobody knows what the device has.
            self.table.clear();
            dev.upload_into(&table, &mut self.pieces)?;
            self.table = table;
        }
        Ok(())
    }

    /// Adds up `sums`, of which each member has those of its parts, to the norm, and updates the parameters on all
    /// members; if the norm is not finite, nothing. With a rule of a graph the gradients are not added up before, and
    /// nothing changes either if the norm of the step before was not finite. All members call it.
    #[track_caller]
    pub fn update<T: Parameter>(
        &self,
        dev: &Device,
        exchange: &mut GradientExchange<T>,
        (sums, norm): (&mut DeviceBuffer<f64>, &DeviceBuffer<f32>),
        (moments, rule, graph_rule): (&[Moments<'_>], Rule, Option<DeviceView<'_, u32>>),
        parameters: &mut [&mut DeviceBuffer<T>],
    ) -> Result<()> {
        let group = exchange.group(dev, OP)?;
        // All members' kernels write to the first answer; only the memory of the second one is held and ordered.
        let told = self.told.iter().take(parameters.len()).copied();
        let same = parameters.iter().map(|parameter| parameter.view().address()).eq(told);
        invalid_if!(!same, OP, "`Model::parameters` gave other buffers a moment before");
        let kernel = Buckets::<T> {
            rule,
            graph_rule,
            norm: norm.view(),
            pieces: self.pieces.view(),
            count: self.table.len() / words(group.count()),
            own: self.own,
            largest: self.largest,
            chunks: self.chunks,
            of: PhantomData,
        };
        let mut extra = vec![(area(norm.view()), Access::Write), (area(self.pieces.view()), Access::Read)];
        let grads = if graph_rule.is_some() { Access::Write } else { Access::Read };
        extra.extend((0..exchange.buckets()).map(|bucket| (area(exchange.memory(bucket)), grads)));
        extra.extend(graph_rule.map(|rule| (area(rule), Access::Read)));
        let state = moments.iter().flat_map(|moments| moments.kept).flatten();
        extra.extend(state.map(|memory| (area(memory), Access::Write)));
        // Those of other parts are written by the other members' kernels, while this member's runs.
        extra.extend(parameters.iter().map(|parameter| (area(parameter.view()), Access::Write)));
        let call = Call::new(OP)
            .elements(T::DTYPE, exchange.layout().extents.iter().map(|extent| extent.len).sum())
            .from(exchange.origin());
        group.sum_by_kernel(call, sums.view_mut(), extra, &kernel)
    }
}

#[cfg(test)]
#[path = "../../tests/unit/data_parallel/together_tests.rs"]
mod tests;
