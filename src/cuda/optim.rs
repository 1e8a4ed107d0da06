//! Launches of the optimizers' steps: many tensors, with several steps each, in one launch.

use super::abi::{
    BatchTable, GradientKind, IN_PACKS, MAX_STEPS, MAX_TENSORS, NUMBERS, StepEntry, SteppedEntry, TO_FLOAT16,
};
use super::device::{Grid, Launcher};
use crate::cpu::{AdamWStep, Arithmetic, SgdStep, check_no_momentum};
use crate::error::Result;
use std::ops::Range;

const THREADS: usize = 256;
/// Blocks that the tensors of a launch share in proportion to their elements; each gets at least one.
const MAX_BLOCKS: usize = 1 << 16;
/// Elements that a thread takes at once.
const PACK: usize = 4;

/// The gradient of one step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GradientAt {
    /// All zeros.
    Zero,
    /// Address of `[num_elements]` float32
    F32(u64),
    /// Address of `[num_elements]` bfloat16
    Bf16(u64),
}

impl GradientAt {
    fn entry(self) -> (u64, GradientKind) {
        match self {
            Self::Zero => (0, GradientKind::Zero),
            Self::F32(address) => (address, GradientKind::Float32),
            Self::Bf16(address) => (address, GradientKind::Bfloat16),
        }
    }

    /// Whether a pack of elements can be read at once.
    fn is_aligned(self) -> bool {
        match self {
            Self::Zero => true,
            Self::F32(address) => address.is_multiple_of((PACK * 4) as u64),
            Self::Bf16(address) => address.is_multiple_of((PACK * 2) as u64),
        }
    }
}

/// Weights of 16 bits whose float32 master is stepped, written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RoundedAt {
    /// Address of `[num_elements]` bfloat16
    Bf16(u64),
    /// Address of `[num_elements]` float16
    F16(u64),
}

impl RoundedAt {
    fn address(self) -> u64 {
        let (Self::Bf16(address) | Self::F16(address)) = self;
        address
    }
}

/// A tensor of [`Launcher::adamw`].
#[derive(Debug, Clone, Copy)]
pub struct AdamW<'a> {
    /// `[num_elements]` float32, written
    pub p: u64,
    /// `[num_elements]` float32, written
    pub m: u64,
    /// `[num_elements]` float32, written
    pub v: u64,
    /// Weights that round `p`, if it is their master
    pub rounded: Option<RoundedAt>,
    /// Elements.
    pub num_elements: usize,
    /// The steps, in order.
    pub steps: &'a [(AdamWStep, GradientAt)],
}

/// A tensor of [`Launcher::sgd`].
#[derive(Debug, Clone, Copy)]
pub struct Sgd<'a> {
    /// `[num_elements]` float32, written
    pub p: u64,
    /// `[num_elements]` float32, written; none if no step has momentum
    pub buffer: Option<u64>,
    /// Weights that round `p`, if it is their master
    pub rounded: Option<RoundedAt>,
    /// Elements.
    pub num_elements: usize,
    /// The steps, in order.
    pub steps: &'a [(SgdStep, GradientAt)],
}

/// A step of any optimizer, in the form that its kernel reads.
trait Step: Copy {
    fn arithmetic(&self) -> Arithmetic;
    /// All numbers except the arithmetic, padded with zeros.
    fn numbers(&self) -> [f32; NUMBERS];
}

impl Step for AdamWStep {
    fn arithmetic(&self) -> Arithmetic {
        self.arithmetic
    }

    fn numbers(&self) -> [f32; NUMBERS] {
        let [_, numbers @ ..] = self.to_array();
        numbers
    }
}

impl Step for SgdStep {
    fn arithmetic(&self) -> Arithmetic {
        self.arithmetic
    }

    fn numbers(&self) -> [f32; NUMBERS] {
        let mut numbers = [0.0; NUMBERS];
        numbers[..Self::LEN - 1].copy_from_slice(&self.to_array()[1..]);
        numbers
    }
}

/// A non-empty tensor of any optimizer, and its steps.
#[derive(Clone, Copy)]
struct TensorSteps<'a, S> {
    arrays: [u64; 3],
    rounded: Option<RoundedAt>,
    num_elements: usize,
    steps: &'a [(S, GradientAt)],
}

impl<S: Step> TensorSteps<'_, S> {
    fn numbers(&self) -> impl ExactSizeIterator<Item = StepEntry> {
        self.steps.iter().map(|(step, _)| StepEntry {
            numbers: step.numbers(),
            arithmetic: u32::from(step.arithmetic() as u8),
        })
    }

    /// Addresses that its steps use, and whether they write them.
    fn ranges(&self) -> impl Iterator<Item = (Range<u64>, bool)> {
        let range = |at: u64, bytes| at..at + (self.num_elements * bytes) as u64;
        let written = self.arrays.iter().filter(|&&at| at != 0).map(move |&at| (range(at, 4), true));
        let read = self.steps.iter().filter_map(move |(_, gradient)| match *gradient {
            GradientAt::Zero => None,
            GradientAt::F32(at) => Some((range(at, 4), false)),
            GradientAt::Bf16(at) => Some((range(at, 2), false)),
        });
        let rounded = self.rounded.map(|rounded| (range(rounded.address(), 2), true));
        written.chain(rounded).chain(read)
    }

    /// Whether the kernel can take it in packs.
    fn is_aligned(&self) -> bool {
        self.arrays.iter().all(|&address| GradientAt::F32(address).is_aligned())
            && self.rounded.is_none_or(|rounded| GradientAt::Bf16(rounded.address()).is_aligned())
            && self.steps.iter().all(|(_, gradient)| gradient.is_aligned())
    }
}

/// Whether written memory does not overlap anything else.
fn are_apart<S: Step>(parts: &[TensorSteps<'_, S>]) -> bool {
    let mut ranges: Vec<_> = parts.iter().flat_map(TensorSteps::ranges).collect();
    ranges.sort_unstable_by_key(|(range, _)| range.start);
    let (mut end_of_written, mut end) = (0, 0);
    ranges.iter().all(|(range, is_written)| {
        let is_apart = range.start >= if *is_written { end } else { end_of_written };
        end = range.end.max(end);
        if *is_written {
            end_of_written = range.end.max(end_of_written);
        }
        is_apart
    })
}

/// The tensors of a launch while they are collected.
struct Batch {
    table: BatchTable,
    num_steps: usize,
    num_tensors: usize,
    num_gradients: usize,
    num_elements: usize,
}

impl Batch {
    fn new() -> Self {
        let table = BatchTable {
            steps: [StepEntry::default(); MAX_STEPS],
            tensors: [SteppedEntry::NONE; MAX_TENSORS],
            gradients: [0; MAX_TENSORS],
            kinds: [GradientKind::Zero; MAX_TENSORS],
        };
        Self { table, num_steps: 0, num_tensors: 0, num_gradients: 0, num_elements: 0 }
    }

    /// Adds a tensor, if there is room; its rows of numbers are shared with equal ones.
    fn add<S: Step>(&mut self, part: &TensorSteps<'_, S>) -> bool {
        let len = part.steps.len();
        let known = self.table.steps[..self.num_steps]
            .windows(len)
            .position(|rows| part.numbers().eq(rows.iter().copied()));
        let first_step = known.unwrap_or(self.num_steps);
        let num_steps = self.num_steps.max(first_step + len);
        if self.num_tensors == MAX_TENSORS || self.num_gradients + len > MAX_TENSORS || num_steps > MAX_STEPS
        {
            return false;
        }
        for (entry, numbers) in self.table.steps[first_step..].iter_mut().zip(part.numbers()) {
            *entry = numbers;
        }
        for (index, (_, gradient)) in (self.num_gradients..).zip(part.steps) {
            (self.table.gradients[index], self.table.kinds[index]) = gradient.entry();
        }
        let flags =
            [(IN_PACKS, part.is_aligned()), (TO_FLOAT16, matches!(part.rounded, Some(RoundedAt::F16(_))))];
        self.table.tensors[self.num_tensors] = SteppedEntry {
            arrays: part.arrays,
            rounded: part.rounded.map_or(0, RoundedAt::address),
            num_elements: part.num_elements as u64,
            end_block: 0,
            first_step: first_step as u8,
            num_steps: len as u8,
            first_gradient: self.num_gradients as u8,
            flags: flags.into_iter().filter(|(_, is_set)| *is_set).map(|(flag, _)| flag).sum(),
        };
        self.num_steps = num_steps;
        self.num_tensors += 1;
        self.num_gradients += len;
        self.num_elements += part.num_elements;
        true
    }

    /// Assigns blocks to each tensor; returns the total number.
    ///
    /// Example: 3000, 1 and 1500 elements: a block takes 1024 of them, so the tensors' blocks end before 3, 4 and 6.
    fn share_blocks(&mut self) -> usize {
        let per_block = (THREADS * PACK).max(self.num_elements.div_ceil(MAX_BLOCKS)) as u64;
        let mut end_block = 0;
        for tensor in &mut self.table.tensors[..self.num_tensors] {
            end_block += tensor.num_elements.div_ceil(per_block) as u32;
            tensor.end_block = end_block;
        }
        end_block as usize
    }
}

impl Launcher {
    /// Applies steps of AdamW in place, to each tensor its own: the bits of [`crate::cpu::adamw`]. One launch takes 64
    /// tensors of one step each, if they have at most 8 different rows of numbers. Tensors that share memory are
    /// stepped in order, with a launch for each.
    ///
    /// # Safety
    /// The addresses must hold what [`AdamW`] and [`GradientAt`] state, on the device. Within a tensor, written memory
    /// must not overlap anything else, and all of it must live until the stream has passed the launches.
    ///
    /// # Errors
    /// Errors of the driver.
    pub unsafe fn adamw(&self, tensors: &[AdamW<'_>]) -> Result<()> {
        let parts = tensors.iter().map(|&AdamW { p, m, v, rounded, num_elements, steps }| TensorSteps {
            arrays: [p, m, v],
            rounded,
            num_elements,
            steps,
        });
        // SAFETY: by the caller's promise.
        unsafe { self.steps("adamw", parts) }
    }

    /// Applies steps of SGD in place, to each tensor its own: the bits of [`crate::cpu::sgd`].
    ///
    /// # Safety
    /// As [`Launcher::adamw`], for what [`Sgd`] states.
    ///
    /// # Errors
    /// Errors of the driver; [`crate::Error::Invalid`] if a step has momentum and there is no buffer.
    pub unsafe fn sgd(&self, tensors: &[Sgd<'_>]) -> Result<()> {
        for tensor in tensors.iter().filter(|tensor| tensor.buffer.is_none()) {
            check_no_momentum(tensor.steps.iter().map(|(step, _)| step))?;
        }
        let parts = tensors.iter().map(|&Sgd { p, buffer, rounded, num_elements, steps }| TensorSteps {
            arrays: [p, buffer.unwrap_or(0), 0],
            rounded,
            num_elements,
            steps,
        });
        // SAFETY: by the caller's promise.
        unsafe { self.steps("sgd", parts) }
    }

    /// Makes as many launches as the tensors and their steps need tables.
    ///
    /// # Safety
    /// The kernel must be that of the steps' optimizer, and be allowed to use the tensors' arrays.
    unsafe fn steps<'a, S: Step + 'a>(
        &self,
        name: &'static str,
        parts: impl Iterator<Item = TensorSteps<'a, S>>,
    ) -> Result<()> {
        let parts: Vec<_> = parts.filter(|part| part.num_elements > 0).collect();
        let at_once = if are_apart(&parts) { parts.len().max(1) } else { 1 };
        for parts in parts.chunks(at_once) {
            let most = parts.iter().map(|part| part.steps.len()).max().unwrap_or(0);
            // The first steps of all tensors come before the next ones.
            for first in (0..most).step_by(MAX_STEPS) {
                let mut batch = Batch::new();
                for part in parts.iter().filter(|part| part.steps.len() > first) {
                    let steps = &part.steps[first..part.steps.len().min(first + MAX_STEPS)];
                    let part = TensorSteps { steps, ..*part };
                    if !batch.add(&part) {
                        // SAFETY: by the caller's promise.
                        unsafe { self.launch_batch(name, std::mem::replace(&mut batch, Batch::new()))? };
                        batch.add(&part);
                    }
                }
                // SAFETY: by the caller's promise.
                unsafe { self.launch_batch(name, batch)? };
            }
        }
        Ok(())
    }

    /// Launches the kernel for a non-empty table.
    ///
    /// # Safety
    /// As [`Launcher::steps`].
    unsafe fn launch_batch(&self, name: &'static str, mut batch: Batch) -> Result<()> {
        let grid = Grid { blocks: batch.share_blocks(), threads: THREADS, shared_bytes: 0 };
        // SAFETY: by the caller's promise; the table is the kernel's only argument.
        unsafe { self.launch_with(name, grid, &[], Some(&batch.table)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A step of AdamW with this epsilon.
    fn step(eps: f32) -> AdamWStep {
        AdamWStep::from_array([0.0, 1.0, 1.0, 1.0, 0.1, 0.1, 0.9, 1.0, 1.0, eps]).unwrap()
    }

    fn add(batch: &mut Batch, num_elements: usize, eps: &[f32]) -> bool {
        let steps: Vec<_> = eps.iter().map(|&eps| (step(eps), GradientAt::F32(20))).collect();
        batch.add(&TensorSteps { arrays: [16, 32, 48], rounded: None, num_elements, steps: &steps })
    }

    #[test]
    fn tensors_share_the_blocks() {
        let mut batch = Batch::new();
        for num_elements in [3000, 1, 1500] {
            assert!(add(&mut batch, num_elements, &[0.0]));
        }
        assert_eq!(batch.share_blocks(), 6);
        let ends = batch.table.tensors.map(|tensor| tensor.end_block);
        assert_eq!(ends[..4], [3, 4, 6, u32::MAX]);
        assert!(add(&mut batch, 1 << 40, &[0.0]));
        assert!(batch.share_blocks() <= MAX_BLOCKS + 4);
    }

    #[test]
    fn equal_rows_are_shared_and_a_full_table_takes_no_more() {
        let mut batch = Batch::new();
        assert!(add(&mut batch, 1, &[1.0, 2.0, 3.0]) && add(&mut batch, 1, &[2.0, 3.0]));
        assert_eq!((batch.num_steps, batch.num_gradients, batch.table.tensors[1].first_step), (3, 5, 1));
        assert!(add(&mut batch, 1, &[4.0, 5.0, 6.0, 7.0]));
        assert!(!add(&mut batch, 1, &[8.0, 9.0]) && add(&mut batch, 1, &[8.0]));
        assert!(!add(&mut batch, 1, &[9.0]), "a ninth row");
        let more = (0..MAX_TENSORS).take_while(|_| add(&mut batch, 1, &[8.0])).count();
        assert_eq!((batch.num_gradients, more), (MAX_TENSORS, MAX_TENSORS - 10));
        let mut batch = Batch::new();
        assert_eq!((0..99).take_while(|_| add(&mut batch, 1, &[1.0])).count(), MAX_TENSORS);
    }

    #[test]
    fn shared_memory_is_found() {
        let gradient = |gradient| [(step(0.0), gradient)];
        let are_free = |p: [u64; 2], rounded: [Option<RoundedAt>; 2], gradients: [GradientAt; 2]| {
            let steps = gradients.map(gradient);
            let part = |i: usize| TensorSteps {
                arrays: [p[i], p[i] + 1000, 0],
                rounded: rounded[i],
                num_elements: 10,
                steps: &steps[i],
            };
            are_apart(&[part(0), part(1)])
        };
        let is_apart = |p, gradients| are_free(p, [None; 2], gradients);
        let none = [GradientAt::Zero; 2];
        assert!(is_apart([100, 140], none) && is_apart([140, 100], none));
        assert!(!is_apart([100, 136], none) && !is_apart([1100, 96], none) && !is_apart([100, 100], none));
        assert!(is_apart([100, 140], [GradientAt::F32(5000); 2]), "both may read it");
        assert!(is_apart([100, 140], [GradientAt::F32(60), GradientAt::Bf16(1080)]));
        assert!(!is_apart([100, 140], [GradientAt::F32(64), GradientAt::Zero]));
        assert!(!is_apart([100, 140], [GradientAt::Bf16(176), GradientAt::Zero]));
        assert!(is_apart([100, 140], [GradientAt::Bf16(180), GradientAt::Zero]));
        let rounded = |at| [Some(RoundedAt::Bf16(at)), None];
        assert!(are_free([100, 140], rounded(180), none) && !are_free([100, 140], rounded(178), none));
        assert!(!are_free([100, 140], rounded(5000), [GradientAt::Zero, GradientAt::Bf16(5018)]));
    }

    #[test]
    fn packs_need_aligned_arrays_and_gradients() {
        let are_aligned = |arrays, rounded, gradient| {
            TensorSteps { arrays, rounded, num_elements: 1, steps: &[(step(0.0), gradient)] }.is_aligned()
        };
        let is_aligned = |arrays, gradient| are_aligned(arrays, None, gradient);
        assert!(is_aligned([16, 32, 48], GradientAt::F32(16)) && is_aligned([16, 0, 0], GradientAt::Zero));
        assert!(is_aligned([16, 32, 48], GradientAt::Bf16(8)));
        assert!(
            !is_aligned([16, 32, 52], GradientAt::F32(16)) && !is_aligned([16, 32, 48], GradientAt::F32(24))
        );
        assert!(!is_aligned([16, 32, 48], GradientAt::Bf16(4)));
        assert!(are_aligned([16, 32, 48], Some(RoundedAt::F16(8)), GradientAt::Zero));
        assert!(!are_aligned([16, 32, 48], Some(RoundedAt::F16(4)), GradientAt::Zero));
    }
}
