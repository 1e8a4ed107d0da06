//! The table of libtorch's stable C functions, resolved in the running process.
//!
//! Signatures follow `torch/csrc/inductor/aoti_torch/c/shim.h` and `torch/csrc/stable/c/shim.h`.

use crate::error::{Error, Result};
use std::ffi::{CStr, c_char, c_void};
use std::sync::OnceLock;

/// `at::Tensor*`, owned.
pub(super) type TensorHandle = *mut c_void;
/// `torch::Library*`; deleting it removes the registrations, so it is kept.
pub(super) type LibraryHandle = *mut c_void;
/// `c10::DeviceGuard*`.
pub(super) type GuardHandle = *mut c_void;
/// A list of [`StableValue`]s, owned.
pub(super) type ListHandle = *mut c_void;
/// A kernel's argument or result: the value itself or an owned pointer, by the schema's type.
pub(super) type StableValue = u64;
/// 0 is success.
pub(super) type Status = i32;
/// A kernel: `(stack, number of inputs, number of outputs)`.
pub(super) type KernelEntry = unsafe extern "C-unwind" fn(*mut StableValue, u64, u64);
/// The body of a parallel loop: `(begin, end, context)`.
pub(super) type LoopBody = unsafe extern "C" fn(i64, i64, *mut c_void);

/// Frees the memory of a tensor: `(address, context)`.
pub(super) type Deleter = unsafe extern "C" fn(*mut c_void, *mut c_void);

/// A library that is already loaded in the process.
struct Loaded(*mut c_void);

impl Loaded {
    fn find(soname: &CStr) -> Option<Self> {
        // SAFETY: a C string; RTLD_NOLOAD runs no code of the library.
        let handle = unsafe { libc::dlopen(soname.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD) };
        (!handle.is_null()).then_some(Self(handle))
    }

    fn symbol(&self, name: &CStr) -> Option<*mut c_void> {
        // SAFETY: a live handle (never closed) and a C string.
        let address = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        (!address.is_null()).then_some(address)
    }
}

macro_rules! symbol_name {
    ($name:ident) => {
        const {
            match CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                Ok(name) => name,
                Err(_) => panic!("an identifier holds no NUL"),
            }
        }
    };
}

macro_rules! symbols {
    (
        required { $(fn $required:ident($($r:ty),*) $(-> $rr:ty)?;)* }
        optional { $(fn $optional:ident($($o:ty),*) $(-> $or:ty)?;)* }
        cuda { $(fn $cuda:ident($($c:ty),*) $(-> $cr:ty)?;)* }
    ) => {
        /// Addresses of the functions, by their C names.
        #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
        pub(super) struct Symbols {
            $(pub(super) $required: unsafe extern "C" fn($($r),*) $(-> $rr)?,)*
            $(pub(super) $optional: Option<unsafe extern "C" fn($($o),*) $(-> $or)?>,)*
            $(pub(super) $cuda: Option<unsafe extern "C" fn($($c),*) $(-> $cr)?>,)*
            /// Throws `c10::Error` if the condition is false: the only supported way to raise.
            pub(super) aoti_torch_check:
                unsafe extern "C-unwind" fn(bool, *const c_char, *const c_char, u32, *const c_char),
            /// C++'s `operator delete`, for boxes that torch below 2.13 has no function for.
            pub(super) operator_delete: unsafe extern "C" fn(*mut c_void),
            /// Whether this libtorch has CUDA.
            pub(super) has_cuda: bool,
        }

        impl Symbols {
            // The fields determine the types; repeating them would hide a difference.
            #[allow(clippy::missing_transmute_annotations)]
            fn resolve(torch: &Loaded, torch_cuda: Option<&Loaded>) -> Result<Self> {
                let mut missing = Vec::new();
                let mut require = |name: &'static CStr| {
                    let address = torch.symbol(name);
                    if address.is_none() {
                        missing.push(name.to_string_lossy());
                    }
                    address.unwrap_or_default()
                };
                $(let $required = require(symbol_name!($required));)*
                let aoti_torch_check = require(c"aoti_torch_check");
                let operator_delete = require(c"_ZdlPv");
                if !missing.is_empty() {
                    return Err(Error::Unavailable {
                        what: "libtorch",
                        problem: format!(
                            "evermoe needs PyTorch 2.10 or newer: the libtorch in this process lacks {}",
                            missing.join(", ")
                        ),
                    });
                }
                // SAFETY: each address is that of the C function of this name, whose signature is the field's type
                // (see the headers named above); none of the required ones is null.
                unsafe {
                    Ok(Self {
                        $($required: std::mem::transmute::<*mut c_void, _>($required),)*
                        $($optional: torch.symbol(symbol_name!($optional))
                            .map(|address| std::mem::transmute::<*mut c_void, _>(address)),)*
                        $($cuda: torch_cuda.and_then(|library| library.symbol(symbol_name!($cuda)))
                            .map(|address| std::mem::transmute::<*mut c_void, _>(address)),)*
                        aoti_torch_check: std::mem::transmute::<*mut c_void, _>(aoti_torch_check),
                        operator_delete: std::mem::transmute::<*mut c_void, _>(operator_delete),
                        has_cuda: torch_cuda.is_some(),
                    })
                }
            }
        }
    };
}

symbols! {
    required {
        fn aoti_torch_library_init_fragment(*const c_char, *const c_char, u32, *mut LibraryHandle) -> Status;
        fn aoti_torch_library_init_impl(*const c_char, *const c_char, *const c_char, u32, *mut LibraryHandle) -> Status;
        fn aoti_torch_library_def(LibraryHandle, *const c_char) -> Status;
        fn torch_library_impl(LibraryHandle, *const c_char, KernelEntry, u64) -> Status;
        fn torch_call_dispatcher(*const c_char, *const c_char, *mut StableValue, u64) -> Status;
        fn torch_list_size(ListHandle, *mut usize) -> Status;
        fn torch_list_get_item(ListHandle, usize, *mut StableValue) -> Status;
        fn torch_delete_list(ListHandle) -> Status;
        fn torch_get_num_threads(*mut u32) -> Status;
        fn torch_parallel_for(i64, i64, i64, LoopBody, *mut c_void) -> Status;
        fn aoti_torch_delete_tensor_object(TensorHandle) -> Status;
        fn aoti_torch_empty_strided(i64, *const i64, *const i64, i32, i32, i32, *mut TensorHandle) -> Status;
        fn aoti_torch_as_strided(TensorHandle, *const i64, *const i64, *mut TensorHandle) -> Status;
        fn aoti_torch_zero_(TensorHandle) -> Status;
        fn aoti_torch_get_data_ptr(TensorHandle, *mut *mut c_void) -> Status;
        fn aoti_torch_get_dim(TensorHandle, *mut i64) -> Status;
        fn aoti_torch_get_numel(TensorHandle, *mut i64) -> Status;
        fn aoti_torch_get_sizes(TensorHandle, *mut *const i64) -> Status;
        fn aoti_torch_get_dtype(TensorHandle, *mut i32) -> Status;
        fn aoti_torch_get_device_type(TensorHandle, *mut i32) -> Status;
        fn aoti_torch_get_device_index(TensorHandle, *mut i32) -> Status;
        fn aoti_torch_is_contiguous(TensorHandle, *mut bool) -> Status;
        fn aoti_torch_grad_mode_is_enabled() -> bool;
        fn aoti_torch_grad_mode_set_enabled(bool);
        fn aoti_torch_create_device_guard(i32, *mut GuardHandle) -> Status;
        fn aoti_torch_delete_device_guard(GuardHandle) -> Status;
        fn aoti_torch_device_type_cpu() -> i32;
        fn aoti_torch_device_type_cuda() -> i32;
        fn aoti_torch_dtype_element_size(i32) -> usize;
        fn aoti_torch_dtype_uint8() -> i32;
        fn aoti_torch_dtype_int32() -> i32;
        fn aoti_torch_dtype_int64() -> i32;
        fn aoti_torch_dtype_float32() -> i32;
        fn aoti_torch_dtype_bfloat16() -> i32;
        fn aoti_torch_dtype_float16() -> i32;
    }
    optional {
        fn torch_from_blob(
            *mut c_void, i64, *const i64, *const i64, i64, i32, i32, i32, *mut TensorHandle, i32, *const u8, i64, Deleter,
            *mut c_void
        ) -> Status; // 2.11
        fn torch_library_def_with_tags(LibraryHandle, *const c_char, *const i32, i32) -> Status; // 2.12
        fn torch_tag_pt2_compliant_tag() -> i32; // 2.12
        fn torch_exception_get_what_without_backtrace() -> *const c_char; // 2.13
        fn torch_delete_stable_ivalue(*mut StableValue) -> Status; // 2.13
    }
    cuda {
        fn aoti_torch_get_current_cuda_stream(i32, *mut *mut c_void) -> Status;
    }
}

static SYMBOLS: OnceLock<Symbols> = OnceLock::new();

/// Resolves the table, once.
///
/// # Errors
/// When torch is not imported, or is older than 2.10.
pub(super) fn load() -> Result<&'static Symbols> {
    if let Some(symbols) = SYMBOLS.get() {
        return Ok(symbols);
    }
    let torch = Loaded::find(c"libtorch_cpu.so").ok_or_else(|| Error::Unavailable {
        what: "libtorch",
        problem: "libtorch_cpu.so is not loaded in this process: `import torch` first".into(),
    })?;
    let symbols = Symbols::resolve(&torch, Loaded::find(c"libtorch_cuda.so").as_ref())?;
    Ok(SYMBOLS.get_or_init(|| symbols))
}

/// The table.
///
/// # Panics
/// Before [`load`] has succeeded; tensors and kernels exist only after it.
#[inline(always)]
pub(super) fn symbols() -> &'static Symbols {
    SYMBOLS.get().expect("libtorch's symbols are loaded before any tensor exists")
}

/// Turns a status into a result that names the call.
#[inline(always)]
pub(super) fn check(status: Status, call: &str) -> Result<()> {
    if status == 0 { Ok(()) } else { Err(failure(call)) }
}

#[cold]
fn failure(call: &str) -> Error {
    let reason = symbols().torch_exception_get_what_without_backtrace.and_then(|what| {
        // SAFETY: no arguments; the text, if any, lives until the thread's next failed call.
        let text = unsafe { what() };
        // SAFETY: not null, hence a C string.
        (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
    });
    let reason = reason.unwrap_or_else(|| "torch gave the reason on stderr".into());
    Error::Torch { call: call.to_owned(), reason }
}
