//! Launching the conversion of rows to 8 bits, and back.

use super::abi::{FP8_AT_ONCE, FP8_COLUMNS, WARP};
use super::device::Launcher;
use super::launch::{FloatType, grid};
use crate::cpu::fp8_row_bytes;
use crate::error::Result;

/// Bytes that a thread takes of a row.
const PART_BYTES: usize = 16;
/// Threads that quantize, at most: what each does before its first part is divided among several.
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
    /// `packed` = the rows in 8 bits, as [`crate::cpu::quantize_rows`] has them.
    ///
    /// # Safety
    /// The addresses hold what [`Fp8Rows`] states.
    ///
    /// # Errors
    /// The driver's.
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

    /// `rows` = the rows of `packed`, as [`crate::cpu::dequantize_rows`] has them.
    ///
    /// # Safety
    /// The addresses hold what [`Fp8Rows`] states.
    ///
    /// # Errors
    /// The driver's.
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
        // SAFETY: by the caller's promise; the kernel's arguments in its order.
        unsafe { self.launch(name, grid(threads), &[&[from, to], &sizes[..]].concat()) }
    }
}
