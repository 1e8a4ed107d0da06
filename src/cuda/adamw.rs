//! Launching the optimizer's steps.

use super::device::{Grid, Launcher};
use crate::cpu::AdamWStep;
use crate::error::Result;
use cudarc::driver::DeviceRepr;

const THREADS: usize = 256;
/// Blocks take several packs of elements in turn.
const MAX_BLOCKS: usize = 1 << 16;
/// Elements that a thread takes at once.
const PACK: usize = 4;
/// Steps of one launch, which are arguments by value. In step with `kMaxSteps` of `kernels/replay.cu`.
const MAX_STEPS: usize = 8;

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
    /// The kind, by the kernel's number, and the address.
    fn parts(self) -> (u32, u64) {
        match self {
            Self::Zero => (0, 0),
            Self::F32(address) => (1, address),
            Self::Bf16(address) => (2, address),
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

/// Arguments of [`Launcher::adamw`].
#[derive(Debug, Clone, Copy)]
pub struct AdamW<'a> {
    /// `[num_elements]` float32, written
    pub p: u64,
    /// `[num_elements]` float32, written
    pub m: u64,
    /// `[num_elements]` float32, written
    pub v: u64,
    /// Elements.
    pub num_elements: usize,
    /// The steps, in their order.
    pub steps: &'a [(AdamWStep, GradientAt)],
}

/// One step as the kernel reads it. In step with `AdamWStep` of `kernels/replay.cu`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct Entry {
    numbers: [f32; AdamWStep::LEN],
    kind: u32,
    gradient: u64,
}

/// The steps of one launch.
#[repr(C)]
#[derive(Debug, Default)]
struct Entries([Entry; MAX_STEPS]);

// SAFETY: numbers alone, laid out as in C.
unsafe impl DeviceRepr for Entries {}

impl Entries {
    fn new(steps: &[(AdamWStep, GradientAt)]) -> Self {
        let mut entries = Self::default();
        for (entry, (step, gradient)) in entries.0.iter_mut().zip(steps) {
            let (kind, gradient) = gradient.parts();
            *entry = Entry { numbers: step.to_array(), kind, gradient };
        }
        entries
    }
}

impl Launcher {
    /// Applies steps of AdamW in place: the bits of [`crate::cpu::adamw`].
    ///
    /// # Safety
    /// The addresses hold what [`AdamW`] and [`GradientAt`] state, on the device; nothing that is written overlaps anything
    /// else, and all of it lives until the stream has passed the launches.
    ///
    /// # Errors
    /// The driver's.
    pub unsafe fn adamw(&self, adamw: &AdamW<'_>) -> Result<()> {
        let AdamW { p, m, v, num_elements, steps } = *adamw;
        if num_elements == 0 {
            return Ok(());
        }
        let aligned = [p, m, v].iter().all(|&address| GradientAt::F32(address).is_aligned());
        for steps in steps.chunks(MAX_STEPS) {
            let whole = aligned && steps.iter().all(|(_, gradient)| gradient.is_aligned());
            let (name, at_once) = if whole { ("adamw_4", PACK) } else { ("adamw_1", 1) };
            let blocks = num_elements.div_ceil(THREADS * at_once).min(MAX_BLOCKS);
            let grid = Grid { blocks, threads: THREADS, shared_bytes: 0 };
            let arguments = [p, m, v, num_elements as u64, steps.len() as u64];
            // SAFETY: by the caller's promise; the kernel's arguments in its order.
            unsafe { self.launch_with(name, grid, &arguments, Some(&Entries::new(steps)))? };
        }
        Ok(())
    }
}
