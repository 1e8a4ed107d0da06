//! Constants and tables shared by launchers and kernels: the counterpart of `kernels/abi.h`, compared by the tests
//! below.

use cudarc::driver::DeviceRepr;

/// Threads of a warp.
pub(super) const WARP: usize = 32;
/// Loads that a thread has in flight.
pub(super) const IN_FLIGHT: usize = 4;
/// Maximum threads of a group that sums rows.
pub(super) const COMBINING_THREADS: usize = 128;
/// Maximum layers of a launch, which are passed by value.
pub(super) const MAX_LAYERS: usize = 64;
/// Columns that share a scale in 8 bits.
pub(super) const FP8_COLUMNS: usize = crate::cpu::FP8_COLUMNS;
/// Parts of a row that a thread loads before it uses the first.
pub(super) const FP8_AT_ONCE: usize = 2;
/// Shared memory per rank in the split of tokens.
pub(super) const HOLDER_BYTES: usize = 32;
/// Shared memory per holder for its claim on a source's tokens.
pub(super) const CLAIM_BYTES: usize = 16;
/// Maximum rows of numbers of a launch, which are passed by value.
pub(super) const MAX_STEPS: usize = 8;
/// Maximum tensors, and maximum gradients, of a launch that steps them.
pub(super) const MAX_TENSORS: usize = 64;
/// Numbers of a step in the table of steps.
pub(super) const NUMBERS: usize = 9;
/// Threads that share a block of bytes.
pub(super) const THREADS_PER_BLOCK: usize = 4;
/// Threads of a launch's blocks that copy chunks.
pub(super) const COPY_THREADS: usize = 64;
/// Threads of a block that digests a unit.
pub(super) const DIGEST_THREADS: usize = 256;

/// One layer's ids.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct LayerEntry {
    pub(super) ids: u64,
    pub(super) num_slots: u64,
    pub(super) end_block: u32,
    pub(super) is_wide: u32,
}

/// The layers of one launch.
#[repr(C)]
#[derive(Debug)]
pub(super) struct LayerTable(pub(super) [LayerEntry; MAX_LAYERS]);

// SAFETY: only numbers, laid out as in C.
unsafe impl DeviceRepr for LayerTable {}

/// The type of a step's gradient.
#[repr(u8)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) enum GradientKind {
    #[default]
    Zero,
    Float32,
    Bfloat16,
}

/// The numbers of one step of any optimizer, padded with zeros.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct StepEntry {
    pub(super) numbers: [f32; NUMBERS],
    pub(super) arithmetic: u32,
}

/// Flag of a tensor that can be read in packs.
pub(super) const IN_PACKS: u8 = 1;
/// Flag of a tensor whose rounded elements are float16, not bfloat16.
pub(super) const TO_FLOAT16: u8 = 2;

/// A tensor with its state, and the range of its steps.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct SteppedEntry {
    pub(super) arrays: [u64; 3],
    pub(super) rounded: u64,
    pub(super) num_elements: u64,
    pub(super) end_block: u32,
    pub(super) first_step: u8,
    pub(super) num_steps: u8,
    pub(super) first_gradient: u8,
    pub(super) flags: u8,
}

impl SteppedEntry {
    /// An absent tensor.
    pub(super) const NONE: Self = Self {
        arrays: [0; 3],
        rounded: 0,
        num_elements: 0,
        end_block: u32::MAX,
        first_step: 0,
        num_steps: 0,
        first_gradient: 0,
        flags: 0,
    };
}

/// The tensors that one launch steps.
#[repr(C)]
#[derive(Debug)]
pub(super) struct BatchTable {
    pub(super) steps: [StepEntry; MAX_STEPS],
    pub(super) tensors: [SteppedEntry; MAX_TENSORS],
    pub(super) gradients: [u64; MAX_TENSORS],
    pub(super) kinds: [GradientKind; MAX_TENSORS],
}

// SAFETY: only numbers, laid out as in C.
unsafe impl DeviceRepr for BatchTable {}

/// Older drivers limit a kernel's parameters to this size.
const _: () = assert!(size_of::<BatchTable>() <= 4096 && MAX_TENSORS.is_power_of_two());

/// Location of a tensor's bytes, on the device and in the stream of chunks.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// Device address, of any alignment.
    pub at: u64,
    /// First byte in the stream of chunks, or in its unit.
    pub start: u64,
    /// Length, above 0.
    pub bytes: u64,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::{AdamWStep, Arithmetic, BLOCK_BYTES, SgdStep, TORCH_LANES};
    use std::io::Write;
    use std::mem::offset_of;
    use std::process::{Command, Stdio};

    const HEADER: &str = include_str!("../../kernels/abi.h");

    /// The constants of the header, with their values in Rust.
    const CONSTANTS: [(&str, usize); 25] = [
        ("kWarp", WARP),
        ("kInFlight", IN_FLIGHT),
        ("kCombiningThreads", COMBINING_THREADS),
        ("kMaxLayers", MAX_LAYERS),
        ("kFp8Columns", FP8_COLUMNS),
        ("kFp8AtOnce", FP8_AT_ONCE),
        ("kHolderBytes", HOLDER_BYTES),
        ("kClaimBytes", CLAIM_BYTES),
        ("kMaxSteps", MAX_STEPS),
        ("kMaxTensors", MAX_TENSORS),
        ("kTorchLanes", TORCH_LANES),
        ("kZero", GradientKind::Zero as usize),
        ("kFloat32", GradientKind::Float32 as usize),
        ("kBfloat16", GradientKind::Bfloat16 as usize),
        ("kInPacks", IN_PACKS as usize),
        ("kToFloat16", TO_FLOAT16 as usize),
        ("kEvermoe", Arithmetic::Evermoe as usize),
        ("kTorchCpuFused", Arithmetic::TorchCpuFused as usize),
        ("kTorchCudaFused", Arithmetic::TorchCudaFused as usize),
        ("kTorchCudaForeach", Arithmetic::TorchCudaForeach as usize),
        ("kBlockBytes", BLOCK_BYTES),
        ("kQuarters", THREADS_PER_BLOCK),
        ("kCopyThreads", COPY_THREADS),
        ("kDigestThreads", DIGEST_THREADS),
        ("AdamWStep::kArrays + SgdStep::kArrays", 3 + 2),
    ];

    /// The numbers of a step by their names in the header, in the order of the optimizer's fields.
    fn numbers(step: &str) -> [&'static str; NUMBERS] {
        // The value of each field is its index in the table.
        let adamw = AdamWStep {
            arithmetic: Arithmetic::Evermoe,
            loss_scale: 0.0,
            factor: 1.0,
            decay: 2.0,
            one_minus_beta1: 3.0,
            one_minus_beta2: 4.0,
            beta2: 5.0,
            step_size: 6.0,
            bias_correction2_sqrt: 7.0,
            eps: 8.0,
        };
        assert_eq!(adamw.to_array()[1..], [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]);
        let sgd = SgdStep {
            arithmetic: Arithmetic::Evermoe,
            loss_scale: 2.0,
            factor: 3.0,
            decay: 4.0,
            momentum: 5.0,
            one_minus_dampening: 6.0,
            lr: 7.0,
            is_first: true,
            nesterov: false,
        };
        assert_eq!(sgd.to_array()[1..], [2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 1.0, 0.0]);
        let (beta1, beta2) =
            (["one_minus_beta1", "one_minus_beta2"], ["beta2", "step_size", "bias_correction2_sqrt", "eps"]);
        match step {
            "AdamWStep" => {
                ["loss_scale", "factor", "decay", beta1[0], beta1[1], beta2[0], beta2[1], beta2[2], beta2[3]]
            }
            _ => {
                let dampening = "one_minus_dampening";
                [
                    "loss_scale",
                    "factor",
                    "decay",
                    "momentum",
                    dampening,
                    "lr",
                    "is_first",
                    "nesterov",
                    "unused",
                ]
            }
        }
    }

    /// All properties of the header that the launchers rely on, as C++ conditions.
    fn conditions() -> Vec<String> {
        let mut found: Vec<String> =
            CONSTANTS.iter().map(|(name, value)| format!("{name} == {value}")).collect();
        let mut size = |name: &str, bytes: usize| found.push(format!("sizeof({name}) == {bytes}"));
        size("LayersIds", size_of::<LayerTable>());
        size("LayerIds", size_of::<LayerEntry>());
        size("Span", size_of::<Span>());
        size("AdamWStep", size_of::<StepEntry>());
        size("SgdStep", size_of::<StepEntry>());
        size("GradientKind", size_of::<GradientKind>());
        size("Stepped", size_of::<SteppedEntry>());
        size("Batch<AdamWStep>", size_of::<BatchTable>());
        size("Batch<SgdStep>", size_of::<BatchTable>());
        let mut offset = |at: &str, bytes: usize| found.push(format!("offsetof({at}) == {bytes}"));
        offset("LayerIds, ids", offset_of!(LayerEntry, ids));
        offset("LayerIds, num_slots", offset_of!(LayerEntry, num_slots));
        offset("LayerIds, end_block", offset_of!(LayerEntry, end_block));
        offset("LayerIds, is_wide", offset_of!(LayerEntry, is_wide));
        offset("Span, at", offset_of!(Span, at));
        offset("Span, start", offset_of!(Span, start));
        offset("Span, bytes", offset_of!(Span, bytes));
        offset("Stepped, arrays", offset_of!(SteppedEntry, arrays));
        offset("Stepped, rounded", offset_of!(SteppedEntry, rounded));
        offset("Stepped, num_elements", offset_of!(SteppedEntry, num_elements));
        offset("Stepped, end_block", offset_of!(SteppedEntry, end_block));
        offset("Stepped, first_step", offset_of!(SteppedEntry, first_step));
        offset("Stepped, num_steps", offset_of!(SteppedEntry, num_steps));
        offset("Stepped, first_gradient", offset_of!(SteppedEntry, first_gradient));
        offset("Stepped, flags", offset_of!(SteppedEntry, flags));
        offset("Batch<AdamWStep>, tensors", offset_of!(BatchTable, tensors));
        offset("Batch<AdamWStep>, gradients", offset_of!(BatchTable, gradients));
        offset("Batch<AdamWStep>, kinds", offset_of!(BatchTable, kinds));
        for step in ["AdamWStep", "SgdStep"] {
            for (place, name) in numbers(step).iter().enumerate() {
                let bytes = offset_of!(StepEntry, numbers) + place * size_of::<f32>();
                offset(&format!("{step}, {name}"), bytes);
            }
            offset(&format!("{step}, arithmetic"), offset_of!(StepEntry, arithmetic));
        }
        found
    }

    /// Compiles the header with these conditions as C++; none if there is no compiler.
    fn compile(conditions: &[String]) -> Option<std::result::Result<(), String>> {
        let runs = |name: &&str| Command::new(name).arg("--version").output().is_ok();
        let compiler = ["c++", "g++", "clang++"].into_iter().find(runs)?;
        let arguments = ["-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-x", "c++", "-"];
        let mut command = Command::new(compiler);
        let command = command.args(arguments).stdin(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("a compiler that runs");
        let checks: String = conditions.iter().map(|is| format!("static_assert({is}, \"\");\n")).collect();
        let program = HEADER.replace("#pragma once", "") + &checks;
        child.stdin.take().expect("piped").write_all(program.as_bytes()).expect("the program");
        let output = child.wait_with_output().expect("its messages");
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        Some(if output.status.success() { Ok(()) } else { Err(message) })
    }

    #[test]
    fn the_header_is_the_same() {
        let Some(result) = compile(&conditions()) else { return };
        result.unwrap();
        let wrong = compile(&[format!("kMaxSteps == {}", MAX_STEPS + 1)]);
        assert!(wrong.is_some_and(|result| result.is_err()), "a wrong number compiles");
    }

    #[test]
    fn no_constant_of_the_header_is_left_out() {
        let code = HEADER.lines().map(|line| line.split("//").next().unwrap_or_default());
        let words = code.flat_map(|line| line.split(|next: char| !next.is_alphanumeric()));
        let is_name =
            |word: &&str| word.strip_prefix('k').is_some_and(|rest| rest.starts_with(char::is_uppercase));
        for name in words.filter(is_name) {
            let known = CONSTANTS.iter().any(|(known, _)| known.split([':', ' ']).any(|part| part == name));
            assert!(known, "{name} of kernels/abi.h is not compared");
        }
    }
}
