//! Launching the optimizers' steps.

use super::abi::{GradientKind, MAX_STEPS, NUMBERS, StepEntry, StepTable};
use super::device::{Grid, Launcher};
use crate::cpu::{AdamWStep, Arithmetic, SgdStep, check_no_momentum};
use crate::error::Result;

const THREADS: usize = 256;
/// Blocks take several packs of elements in turn.
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
    /// The kind, and the address.
    fn parts(self) -> (GradientKind, u64) {
        match self {
            Self::Zero => (GradientKind::Zero, 0),
            Self::F32(address) => (GradientKind::Float32, address),
            Self::Bf16(address) => (GradientKind::Bfloat16, address),
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

/// Arguments of [`Launcher::sgd`].
#[derive(Debug, Clone, Copy)]
pub struct Sgd<'a> {
    /// `[num_elements]` float32, written
    pub p: u64,
    /// `[num_elements]` float32, written; none where no step has momentum
    pub buffer: Option<u64>,
    /// Elements.
    pub num_elements: usize,
    /// The steps, in their order.
    pub steps: &'a [(SgdStep, GradientAt)],
}

/// A step of any optimizer, as its kernel reads it.
trait Step: Copy {
    fn arithmetic(&self) -> Arithmetic;
    /// All but the arithmetic; zeros fill the table up.
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

impl StepTable {
    fn new<S: Step>(steps: &[(S, GradientAt)]) -> Self {
        let mut entries = Self::default();
        for (entry, (step, gradient)) in entries.0.iter_mut().zip(steps) {
            let (kind, gradient) = gradient.parts();
            let arithmetic = u16::from(step.arithmetic() as u8);
            *entry = StepEntry { numbers: step.numbers(), kind, arithmetic, gradient };
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
        // SAFETY: by the caller's promise; the kernels' arguments in their order.
        unsafe {
            self.steps(["adamw_1", "adamw_4"], &[p, m, v], num_elements, steps, |num_steps| {
                vec![p, m, v, num_elements as u64, num_steps]
            })
        }
    }

    /// Applies steps of SGD in place: the bits of [`crate::cpu::sgd`].
    ///
    /// # Safety
    /// Those of [`Launcher::adamw`], for what [`Sgd`] states.
    ///
    /// # Errors
    /// The driver's; [`crate::error::Error::Invalid`] when a step has momentum and there is no buffer.
    pub unsafe fn sgd(&self, sgd: &Sgd<'_>) -> Result<()> {
        let Sgd { p, buffer, num_elements, steps } = *sgd;
        let (has_buffer, buffer) = (u64::from(buffer.is_some()), buffer.unwrap_or(0));
        if has_buffer == 0 {
            check_no_momentum(steps.iter().map(|(step, _)| step))?;
        }
        // SAFETY: by the caller's promise; the kernels' arguments in their order.
        unsafe {
            self.steps(["sgd_1", "sgd_4"], &[p, buffer], num_elements, steps, |num_steps| {
                vec![p, buffer, num_elements as u64, has_buffer, num_steps]
            })
        }
    }

    /// Launches as often as the steps need tables. `names` are the kernels for one element at a time, and for a pack.
    ///
    /// # Safety
    /// The kernels take the `arguments`, which they may with the state's addresses, and a table of these steps.
    unsafe fn steps<S: Step>(
        &self,
        names: [&'static str; 2],
        state: &[u64],
        num_elements: usize,
        steps: &[(S, GradientAt)],
        arguments: impl Fn(u64) -> Vec<u64>,
    ) -> Result<()> {
        if num_elements == 0 {
            return Ok(());
        }
        let aligned = state.iter().all(|&address| GradientAt::F32(address).is_aligned());
        for steps in steps.chunks(MAX_STEPS) {
            let whole = aligned && steps.iter().all(|(_, gradient)| gradient.is_aligned());
            let (name, at_once) = if whole { (names[1], PACK) } else { (names[0], 1) };
            let blocks = num_elements.div_ceil(THREADS * at_once).min(MAX_BLOCKS);
            let grid = Grid { blocks, threads: THREADS, shared_bytes: 0 };
            let arguments = arguments(steps.len() as u64);
            // SAFETY: by the caller's promise.
            unsafe { self.launch_with(name, grid, &arguments, Some(&StepTable::new(steps)))? };
        }
        Ok(())
    }
}
