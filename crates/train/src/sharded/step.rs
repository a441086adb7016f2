//! A step of an optimizer whose state is divided among the members (ZeRO-1), on gradients that lie in one buffer:
//! reduce-scatter, the norm, the update of the own part, all-gather of the parameters.
//!
//! Where kernels can wait for each other, all of it is [one kernel](super::kernels) of each member; elsewhere it is
//! three collectives and the kernels of [`update`]. Between processes that one kernel works in memory that they lend
//! each other, so the gradients are copied before, and the parameters behind. Invariant: all ways give the same bits.

use super::kernels::{self, OneKernel};
use crate::runtime::{
    Access, Area, CHUNK, Call, DeviceInternals, ErrorInternals, GroupInternals, Home, OpSite, Origin, Unit, area,
    exclusive, mismatch, norm, part_of,
    segments::{SEGMENTS, Segment},
};
use crate::update::{self, Kept, Moments, Parameter, Rule};
use gpu_pool::{
    AsView, AsViewMut, DType, Device, DeviceBuffer, DeviceView, DeviceViewMut, Error, Group, ReduceOp, Result,
    error::Site,
};
use smallvec::SmallVec;
use std::{ops::Range, sync::Arc};

const OP: &str = "ShardedOptimizer";

/// Most bytes of gradients that members of several processes copy for one kernel of all. Each has them twice then, so
/// it is little beside the memory of a GPU.
const MOST_LENT: usize = 256 << 20;

#[derive(Clone)]
pub(super) struct Terms {
    pub dtype: DType,
    pub sizes: Arc<[usize]>,
    pub reduce: ReduceOp,
    pub optimizer: String,
    pub site: Site,
}

type Named = (&'static str, fn(&Terms) -> String);

pub(super) struct ShardedStep<T: Parameter> {
    home: Home,
    /// Identifies it; the same on all members.
    id: Origin,
    reduce: ReduceOp,
    clips: bool,
    places: Box<[Range<usize>]>,
    /// Elements, with the gaps between gradients; those of each member's part.
    len: usize,
    counts: SmallVec<[usize; 8]>,
    part: Range<usize>,
    /// Whether a step is one kernel: kernels can meet, and one launch can name the parameters of every part.
    one_kernel: bool,
    /// Memory of all members, by rank, for kernels of several processes: gradients, and the squares of their chunks.
    lent: Option<Vec<DeviceBuffer<T>>>,
    kept: Kept,
    sums: DeviceBuffer<f64>,
    norm: DeviceBuffer<f32>,
    /// Inter-block flags of the fused kernel.
    block_flags: Option<DeviceBuffer<u64>>,
    graph_rule: DeviceBuffer<u32>,
    of: std::marker::PhantomData<fn() -> T>,
}

impl Terms {
    /// Compares the terms of all members: `Err` on all of them if they differ.
    fn compare(self, group: &Group<'_>) -> Result<()> {
        let (here, site) = (group.here(), self.site);
        let text = format!("{OP}({:?}, {}, {}, {:?})", self.dtype, self.reduce, self.optimizer, self.sizes);
        let all = here.exchange(self)?;
        let parts: [Named; 4] = [
            ("dtype", |terms| format!("parameters of {:?}", terms.dtype)),
            ("size", |terms| format!("sizes {:?}", terms.sizes)),
            ("reduce op", |terms| terms.reduce.to_string()),
            ("optimizer", |terms| terms.optimizer.clone()),
        ];
        for (rank, other) in all.iter().enumerate().skip(1) {
            if let Some((what, text)) = parts.iter().find(|(_, text)| text(&all[0]) != text(other)) {
                let difference = (*what, text(&all[0]), text(other));
                return Err(mismatch(&here, rank, difference, [all[0].site, other.site]));
            }
        }
        group.agree(Origin::default(), OP, site, &text)
    }
}

impl<T: Parameter> ShardedStep<T> {
    /// All members call it.
    #[track_caller]
    pub fn new(group: &Group<'_>, terms: Terms, keeps: [bool; 3], clips: bool) -> Result<Self> {
        let right = matches!(terms.reduce, ReduceOp::Sum | ReduceOp::Avg);
        invalid_if!(!right, OP, "{} of gradients: Sum or Avg", terms.reduce);
        let dev = &*group.device().in_order();
        dev.not_in_graph(OP)?;
        let (id, sizes, reduce) = (group.new_exchange(), terms.sizes.clone(), terms.reduce);
        terms.compare(group)?;
        let (places, len) = places::<T>(&sizes)?;
        let members = group.count();
        let part = part_of(len, group.rank(), members);
        let most = (0..members).map(|rank| within(&places, &part_of(len, rank, members)).count()).max();
        let one_kernel = most.is_some_and(|most| most <= SEGMENTS);
        let sums = if clips { len.div_ceil(CHUNK) * size_of::<f64>() / size_of::<T>() } else { 0 };
        let fits = group.spans_processes() && one_kernel && (1..=MOST_LENT).contains(&(len * size_of::<T>()));
        let lent = if fits { group.lend(&Call::new(OP), len + sums)? } else { None };
        let one_kernel = one_kernel && members > 1 && (group.kernels_meet() || lent.is_some());
        if one_kernel {
            // Not later: to load a module may wait for kernels that wait for this member.
            dev.load(kernels::entry::<T>())?;
        }
        Ok(ShardedStep {
            home: Home::of(group),
            id,
            reduce,
            clips,
            len,
            counts: (0..members).map(|rank| part_of(len, rank, members).len()).collect(),
            one_kernel,
            lent,
            kept: update::kept(dev, keeps, part.len())?,
            sums: dev.zeros(len.div_ceil(CHUNK))?,
            norm: dev.zeros(1)?,
            block_flags: (clips && one_kernel).then(|| dev.zeros(2 * part.len().div_ceil(CHUNK))).transpose()?,
            graph_rule: dev.upload(bytemuck::cast_slice(&[gathering(Rule::nothing(), &places)]))?,
            places,
            part,
            of: std::marker::PhantomData,
        })
    }

    pub fn use_calls(&mut self) {
        (self.one_kernel, self.lent) = (false, None);
    }

    pub fn is_one_kernel(&self) -> bool {
        self.one_kernel
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn place(&self, parameter: usize) -> Option<Range<usize>> {
        self.places.get(parameter).cloned()
    }

    pub fn part(&self) -> Range<usize> {
        self.part.clone()
    }

    pub fn norm(&self) -> Option<DeviceView<'_, f32>> {
        self.clips.then(|| self.norm.view())
    }

    /// Writes the rule that the next launch of a graph takes.
    pub fn set_later(&mut self, dev: &Device, rule: Rule) -> Result<()> {
        self.home.here(dev, "prepare")?;
        let rule = gathering(rule, &self.places);
        dev.upload_into(bytemuck::cast_slice(&[rule]), &mut self.graph_rule)
    }

    fn segments<'a>(&self, range: Range<usize>, weights: &[DeviceView<'a, T>]) -> SmallVec<[Segment<'a, T>; 8]> {
        let segment = |(parameter, part): (usize, Range<usize>)| {
            let begin = self.places[parameter].start;
            let memory = weights[parameter].slice(part.start - begin..part.end - begin);
            Segment { start: part.start, len: part.len(), memory: Some(memory) }
        };
        within(&self.places, &range).map(segment).collect()
    }

    #[track_caller]
    pub fn check(&self, grads: &DeviceViewMut<'_, T>, weights: &[DeviceViewMut<'_, T>]) -> Result<()> {
        let (len, wanted) = (grads.len(), self.len);
        invalid_if!(len != wanted, "step", "gradients of {len} elements where {wanted} are needed");
        let (count, wanted) = (weights.len(), self.places.len());
        invalid_if!(count != wanted, "step", "{count} parameters where {wanted} are needed");
        for (i, (weight, place)) in weights.iter().zip(&self.places).enumerate() {
            let (len, had) = (weight.len(), place.len());
            invalid_if!(len != had, "step", "parameter {i} has {len} elements, and had {had}");
        }
        let aligned = std::iter::once(grads).chain(weights).all(|x| x.address().is_multiple_of(16));
        invalid_if!(!aligned, "step", "memory that does not begin at a multiple of 16 bytes");
        Ok(())
    }

    /// One step, number `steps`, of memory that was [checked](Self::check). All members call it. In a capture the rule
    /// is the one of [`set_later`](Self::set_later) at each launch.
    pub fn step(
        &mut self,
        dev: &Device,
        (rule, steps): (Rule, u64),
        mut grads: DeviceViewMut<'_, T>,
        weights: &mut [DeviceViewMut<'_, T>],
    ) -> Result<()> {
        let group = self.home.here(dev, "step")?;
        if self.len == 0 {
            return Ok(());
        }
        let rule = gathering(rule, &self.places);
        let origin = self.id.in_step(steps);
        if let Some(mut lent) = self.lent.take() {
            let stepped = self.in_lent(&group, (rule, origin), &mut lent, &grads.view(), weights);
            self.lent = Some(lent);
            return stepped;
        }
        match self.one_kernel && !group.spans_processes() {
            true => self.by_one_kernel(&group, (rule, origin), &mut grads, weights)?,
            false => self.by_calls(&group, (rule, origin), &mut grads, weights)?,
        }
        if !is_flat(&self.places) {
            self.bring_back(dev, &grads.view(), weights)?;
        }
        Ok(())
    }

    fn moments(&self) -> Moments<'_> {
        Moments::of(self.part.start, &self.kept)
    }

    fn kernel<'a>(&'a self, dev: &Device, rule: Rule, segments: &'a [Segment<'a, T>]) -> OneKernel<'a, T> {
        OneKernel {
            reduce: self.reduce,
            rule,
            graph_rule: dev.captures().then(|| self.graph_rule.view()),
            moments: self.moments(),
            norm: self.norm(),
            block_flags: self.block_flags.as_ref().map(|block_flags| block_flags.view()),
            len: self.len,
            part: self.part.clone(),
            largest: self.counts.iter().copied().max().unwrap_or(0),
            segments,
        }
    }

    /// The memory of this member that the kernel touches, but for gradients.
    fn touched(&self, segments: &[Segment<'_, T>]) -> Vec<(Area, Access)> {
        let mut extra = vec![(area(self.norm.view()), Access::Write), (area(self.graph_rule.view()), Access::Read)];
        extra.extend(self.block_flags.iter().map(|block_flags| (area(block_flags.view()), Access::Write)));
        extra.extend(self.kept.iter().flatten().map(|memory| (area(memory.view()), Access::Write)));
        extra.extend(segments.iter().filter_map(|segment| Some((area(segment.memory?), Access::Write))));
        extra
    }

    #[track_caller]
    fn call(&self, origin: Origin) -> Call {
        Call::new("sharded_step").elements(T::DTYPE, self.len).counts(&self.counts).from(origin)
    }

    #[track_caller]
    fn in_lent(
        &self,
        group: &Group<'_>,
        (rule, origin): (Rule, Origin),
        lent: &mut [DeviceBuffer<T>],
        grads: &DeviceView<'_, T>,
        weights: &mut [DeviceViewMut<'_, T>],
    ) -> Result<()> {
        let (dev, me) = (group.device(), group.rank());
        dev.copy(grads, &mut lent[me].slice_mut(..self.len))?;
        {
            let views: SmallVec<[DeviceView<'_, T>; 8]> = weights.iter().map(|x| x.view()).collect();
            let segments = self.segments(self.part.clone(), &views);
            let kernel = self.kernel(dev, rule, &segments);
            group.in_lent(self.call(origin), (lent, self.len), self.touched(&segments), &kernel)?;
        }
        self.bring_back(dev, &lent[me].slice(..self.len), weights)
    }

    #[track_caller]
    fn by_one_kernel(
        &self,
        group: &Group<'_>,
        (rule, origin): (Rule, Origin),
        grads: &mut DeviceViewMut<'_, T>,
        weights: &mut [DeviceViewMut<'_, T>],
    ) -> Result<()> {
        let dev = group.device();
        let views: SmallVec<[DeviceView<'_, T>; 8]> = weights.iter().map(|x| x.view()).collect();
        let segments = self.segments(self.part.clone(), &views);
        let (call, kernel, mut extra) = (self.call(origin), self.kernel(dev, rule, &segments), self.touched(&segments));
        extra.push((area(grads.view()), Access::Write));
        match is_flat(&self.places) {
            true => {
                let to = exclusive(views[0]);
                group.parts_by_kernel((call, self.reduce), &self.counts, Some(grads.view()), to, extra, &kernel)
            }
            false => group.parts_by_kernel((call, self.reduce), &self.counts, None, grads.view_mut(), extra, &kernel),
        }
    }

    fn by_calls(
        &mut self,
        group: &Group<'_>,
        (rule, origin): (Rule, Origin),
        grads: &mut DeviceViewMut<'_, T>,
        weights: &mut [DeviceViewMut<'_, T>],
    ) -> Result<()> {
        let (dev, part) = (group.device(), self.part.clone());
        // A single member's gradients are their sum and their mean.
        if group.count() > 1
            && let Some(begun) =
                group.begin_reduce_scatter(origin, grads.view_mut(), &self.counts, self.reduce, false)?
        {
            begun.end(group)?;
        }
        if self.clips {
            let own = part.start / CHUNK..part.end.div_ceil(CHUNK);
            if !part.is_empty() {
                update::squares(dev, &grads.slice(part.clone()), &self.sums.slice(own))?;
            }
            let chunks: SmallVec<[usize; 8]> = self.counts.iter().map(|count| count.div_ceil(CHUNK)).collect();
            group.all_gather_from(origin, self.sums.view_mut(), &chunks)?;
            norm::<T>(dev, &self.sums.view(), &self.norm.view())?;
        }
        let views: SmallVec<[DeviceView<'_, T>; 8]> = weights.iter().map(|x| x.view()).collect();
        let graph_rule = dev.captures().then(|| self.graph_rule.view());
        let (moments, norm, segments) = (self.moments(), self.norm.view(), self.segments(part, &views));
        update::update(dev, &grads.view(), &moments, &norm, &segments, (rule, graph_rule.as_ref()))?;
        drop((segments, views));
        if !is_flat(&self.places) {
            return group.all_gather_from(origin, grads.view_mut(), &self.counts);
        }
        // The gradients may have zeros behind them, the parameters have not.
        let (len, members) = (weights[0].len(), self.counts.len());
        let within = |rank| part_of(self.len, rank, members);
        let counts: SmallVec<[usize; 8]> =
            (0..members).map(|rank| within(rank).end.min(len) - within(rank).start.min(len)).collect();
        group.all_gather_from(origin, weights[0].view_mut(), &counts)
    }

    fn bring_back(&self, dev: &Device, grads: &DeviceView<'_, T>, weights: &mut [DeviceViewMut<'_, T>]) -> Result<()> {
        let views: SmallVec<[DeviceView<'_, T>; 8]> = weights.iter().map(|x| x.view()).collect();
        for range in [0..self.part.start, self.part.end..self.len] {
            update::bring_back(dev, grads, &self.segments(range, &views))?;
        }
        Ok(())
    }

    /// All members' state of one kind, for all elements; empty if nothing is kept. It meets and waits.
    pub fn kept(&self, dev: &Device, which: usize) -> Result<Vec<f32>> {
        let group = self.home.here(dev, "state")?;
        dev.not_in_graph("state")?;
        let Some(own) = &self.kept[which] else { return Ok(Vec::new()) };
        let mut all = dev.zeros::<f32>(self.len)?;
        if !self.part.is_empty() {
            dev.copy(own, &mut all.slice_mut(self.part.clone()))?;
        }
        group.all_gather_from(self.id, all.view_mut(), &self.counts)?;
        dev.download(&all)
    }

    /// Replaces what this member keeps of one kind. `all` has all elements, or none if nothing is kept.
    pub fn set_kept(&mut self, dev: &Device, which: usize, all: &[f32]) -> Result<()> {
        self.home.here(dev, "set_state")?;
        dev.not_in_graph("set_state")?;
        let Some(own) = &mut self.kept[which] else { return Ok(()) };
        dev.upload_into(&all[self.part.clone()], own)
    }

    /// Checks that the processes set the same state, which `text` describes. One process alone compares nothing.
    #[track_caller]
    pub fn agree(&self, dev: &Device, text: impl FnOnce() -> String) -> Result<()> {
        let group = self.home.here(dev, "set_state")?;
        match group.spans_processes() {
            true => group.agree(Origin::default(), "set_state", OpSite::place(), &text()),
            false => Ok(()),
        }
    }

    pub fn kept_len(&self, which: usize) -> usize {
        if self.kept[which].is_some() { self.len } else { 0 }
    }
}

fn is_flat(places: &[Range<usize>]) -> bool {
    places.len() == 1
}

fn gathering(rule: Rule, places: &[Range<usize>]) -> Rule {
    Rule { gather: u32::from(!is_flat(places)), ..rule }
}

/// Where gradients of these sizes lie, one behind the other, at multiples of 16 bytes; and the number of elements.
#[track_caller]
fn places<T>(sizes: &[usize]) -> Result<(Box<[Range<usize>]>, usize)> {
    let site = OpSite::place();
    let too_many = || Error::invalid_at(site, OP, "more elements than there are addresses");
    let mut end = 0usize;
    let mut found = Vec::with_capacity(sizes.len());
    for &size in sizes {
        let behind = end.checked_add(size).filter(|&behind| behind <= isize::MAX as usize / 16).ok_or_else(too_many)?;
        found.push(end..behind);
        end = Unit::of::<T>().padded(behind);
    }
    Ok((found.into(), end))
}

fn within<'a>(
    places: &'a [Range<usize>],
    range: &Range<usize>,
) -> impl Iterator<Item = (usize, Range<usize>)> + use<'a> {
    let (start, end) = (range.start, range.end);
    // They are in order; an empty one may be anywhere.
    let first = places.partition_point(|place| place.end <= start);
    let some = places[first..].iter().enumerate().take_while(move |(_, place)| place.start < end);
    some.map(move |(k, place)| (first + k, place.start.max(start)..place.end.min(end)))
        .filter(|(_, part)| !part.is_empty())
}
