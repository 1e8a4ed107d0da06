//! Registration with torch's dispatcher, and torch's thread pool.

use super::ffi::{KernelEntry, LibraryHandle, check, symbols};
use super::kernel::{Kernel, entry};
use super::tensor::ABI_VERSION;
use crate::cpu::Parallel;
use crate::error::Result;
use std::any::Any;
use std::ffi::{CStr, CString, c_void};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Mutex;

const NAMESPACE: &CStr = c"evermoe";
/// Torch keeps this pointer for its messages.
const FILE: &CStr = c"evermoe";

/// An op: its schema and the kernel that serves every device.
pub(super) struct Op {
    pub(super) name: &'static str,
    /// The schema without the name: arguments and results.
    pub(super) signature: &'static str,
    entry: KernelEntry,
}

impl Op {
    /// Pairs a schema with a function of the same arguments.
    pub(super) fn new<A, F: Kernel<A>>(name: &'static str, signature: &'static str, _kernel: F) -> Self {
        Self { name, signature, entry: entry::<F, A> }
    }
}

/// Declares the ops in the namespace `evermoe`, for the life of the process.
pub(super) fn define(ops: &[Op]) -> Result<()> {
    let mut library: LibraryHandle = std::ptr::null_mut();
    // SAFETY: C strings that live forever, and a pointer to the handle (which is kept: deleting it deregisters).
    let status = unsafe {
        (symbols().aoti_torch_library_init_fragment)(NAMESPACE.as_ptr(), FILE.as_ptr(), line!(), &mut library)
    };
    check(status, "torch::Library")?;
    for op in ops {
        let schema = c_string(&[op.name, op.signature].concat());
        // SAFETY: a live library, and a C string that torch copies.
        check(unsafe { define_one(library, &schema) }, op.name)?;
    }
    Ok(())
}

/// Declares an op, tagged as usable by `torch.compile` where torch supports the tag (from 2.12).
unsafe fn define_one(library: LibraryHandle, schema: &CStr) -> i32 {
    let symbols = symbols();
    // SAFETY: as for the caller; one tag, which equals the count.
    unsafe {
        match (symbols.torch_library_def_with_tags, symbols.torch_tag_pt2_compliant_tag) {
            (Some(define), Some(tag)) => define(library, schema.as_ptr(), [tag()].as_ptr(), 1),
            _ => (symbols.aoti_torch_library_def)(library, schema.as_ptr()),
        }
    }
}

/// Registers the kernels of the ops for a dispatch key, for the life of the process.
pub(super) fn implement(ops: &[Op], key: &CStr) -> Result<()> {
    let mut library: LibraryHandle = std::ptr::null_mut();
    // SAFETY: as in `define`.
    let status = unsafe {
        (symbols().aoti_torch_library_init_impl)(
            NAMESPACE.as_ptr(),
            key.as_ptr(),
            FILE.as_ptr(),
            line!(),
            &mut library,
        )
    };
    check(status, "torch::Library")?;
    for op in ops {
        let name = c_string(op.name);
        // SAFETY: a live library, a C string that torch copies, and an entry for this schema.
        let status = unsafe { (symbols().torch_library_impl)(library, name.as_ptr(), op.entry, ABI_VERSION) };
        check(status, op.name)?;
    }
    Ok(())
}

fn c_string(text: &str) -> CString {
    CString::new(text).expect("schemas hold no NUL")
}

/// Torch's own threads: no second pool competes with them, and `torch.set_num_threads` is respected.
#[derive(Clone, Copy)]
pub(crate) struct TorchPool;

/// State that the threads of a loop share: the body, and the first panic.
struct Shared<'a> {
    body: &'a (dyn Fn(Range<usize>) + Sync),
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

unsafe extern "C" fn run_range(begin: i64, end: i64, context: *mut c_void) {
    // SAFETY: the context that `run` passes, which outlives the loop.
    let shared = unsafe { &*context.cast::<Shared<'_>>() };
    // A panic must not unwind through OpenMP's frames, so it is passed to the caller.
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| (shared.body)(begin as usize..end as usize)))
        && let Ok(mut first) = shared.panic.lock()
    {
        first.get_or_insert(panic);
    }
}

impl Parallel for TorchPool {
    fn threads(&self) -> usize {
        let mut threads = 1;
        // SAFETY: a pointer to the number; the call cannot fail.
        unsafe { (symbols().torch_get_num_threads)(&mut threads) };
        threads as usize
    }

    fn run(&self, len: usize, grain: usize, body: &(dyn Fn(Range<usize>) + Sync)) {
        if len <= grain {
            if len > 0 {
                body(0..len);
            }
            return;
        }
        let shared = Shared { body, panic: Mutex::new(None) };
        let context = (&raw const shared).cast_mut().cast::<c_void>();
        // SAFETY: the loop ends before `shared` does; `run_range` only reads it, through a lock.
        let status =
            unsafe { (symbols().torch_parallel_for)(0, len as i64, grain as i64, run_range, context) };
        if let Some(panic) = shared.panic.into_inner().unwrap_or(None) {
            resume_unwind(panic);
        }
        assert!(status == 0, "torch_parallel_for failed");
    }
}
