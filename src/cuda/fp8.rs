//! Launches of the conversion of rows to 8 bits, and back.

use super::abi::{FP8_AT_ONCE, FP8_COLUMNS, WARP};
use super::device::Launcher;
use super::launch::{FloatType, grid};
use crate::cpu::fp8_row_bytes;
use crate::error::Result;

/// Bytes of a row that a thread takes.
const PART_BYTES: usize = 16;
/// Maximum threads that quantize: the work before each thread's first part pays off over several parts.
const MAX_QUANTIZING: usize = 1 << 19;

/// Arguments of [`Launcher::quantize_rows`] and [`Launcher::dequantize_rows`].
#[derive(Debug, Clone, Copy)]
pub struct Fp8Rows {
    /// `[num_rows, width]`
    pub rows: u64,
    /// `[num_rows, fp8_row_bytes(width)]`, aligned to 16
    pub packed: u64,
    /// Type of `rows`.
    pub row_type: FloatType,
    /// Rows.
    pub num_rows: usize,
    /// Columns.
    pub width: usize,
}

impl Launcher {
    /// Quantizes rows to `packed`, as [`crate::cpu::quantize_rows`] does.
    ///
    /// # Safety
    /// The addresses must hold what [`Fp8Rows`] states.
    ///
    /// # Errors
    /// Errors of the driver.
    pub unsafe fn quantize_rows(&self, quantize: &Fp8Rows) -> Result<()> {
        let Fp8Rows { rows, packed, row_type, num_rows, width } = *quantize;
        let name = match row_type {
            FloatType::F32 => "quantize_f32",
            FloatType::Bf16 => "quantize_bf16",
            FloatType::F16 => "quantize_f16",
        };
        let lanes = FP8_COLUMNS * row_type.bytes() / PART_BYTES;
        let parts = num_rows * width.div_ceil(FP8_COLUMNS) * lanes;
        let threads = parts.div_ceil(FP8_AT_ONCE).min(MAX_QUANTIZING).next_multiple_of(WARP);
        // SAFETY: by the caller's promise.
        unsafe { self.launch_fp8(name, threads, [rows, packed], num_rows, width) }
    }

    /// Dequantizes `packed` to `rows`, as [`crate::cpu::dequantize_rows`] does.
    ///
    /// # Safety
    /// The addresses must hold what [`Fp8Rows`] states.
    ///
    /// # Errors
    /// Errors of the driver.
    pub unsafe fn dequantize_rows(&self, quantized: &Fp8Rows) -> Result<()> {
        let Fp8Rows { rows, packed, row_type, num_rows, width } = *quantized;
        let name = match row_type {
            FloatType::F32 => "dequantize_f32",
            FloatType::Bf16 => "dequantize_bf16",
            FloatType::F16 => "dequantize_f16",
        };
        let threads = num_rows * (width * row_type.bytes()).div_ceil(PART_BYTES);
        // SAFETY: by the caller's promise.
        unsafe { self.launch_fp8(name, threads, [packed, rows], num_rows, width) }
    }

    /// # Safety
    /// As for the callers.
    unsafe fn launch_fp8(
        &self,
        name: &'static str,
        threads: usize,
        [from, to]: [u64; 2],
        num_rows: usize,
        width: usize,
    ) -> Result<()> {
        if num_rows == 0 || width == 0 {
            return Ok(());
        }
        let sizes = [num_rows, width, fp8_row_bytes(width)].map(|size| size as u64);
        // SAFETY: by the caller's promise; the arguments are in the kernel's order.
        unsafe { self.launch(name, grid(threads), &[&[from, to], &sizes[..]].concat()) }
    }
}
