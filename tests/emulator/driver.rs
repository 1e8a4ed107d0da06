//! The stand-in driver for tests: built from the kernels' source, loaded under the name that cudarc asks for first.
//!
//! Work on streams runs only when something waits for it: call [`finish`] before results are read.

use cudarc::driver::{result, sys};
use evermoe::cuda::{self, Launcher};
use std::ffi::{CStr, CString, c_int, c_void};
use std::mem::transmute;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::Command;
use std::ptr;

/// As `streams::Policy` of streams.h: how work on several streams is ordered; from `RANDOM` on, a seed.
pub(crate) const LATE: c_int = 0;
pub(crate) const EARLY: c_int = 1;
pub(crate) const RANDOM: c_int = 2;

type Symbol = *mut c_void;

/// The loaded driver.
pub(crate) struct Driver {
    set_policy: extern "C" fn(c_int),
    launches: extern "C" fn() -> c_int,
    fault: extern "C" fn(c_int),
    refuse: extern "C" fn(c_int),
    is_idle: extern "C" fn() -> c_int,
    waits_for_all: extern "C" fn() -> c_int,
    functions_loaded: extern "C" fn() -> c_int,
}

impl Driver {
    /// Builds and loads the driver; `None` without kernels, or without g++ and make on x86-64.
    pub(crate) fn load() -> Option<Self> {
        let has = |program| Command::new(program).arg("--version").output().is_ok();
        if !cuda::has_kernels() || !has("g++") || !has("make") {
            return None;
        }
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("emulator");
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let mut make = Command::new("make");
        make.args(["--silent", "-j2", "-f"]).arg(root.join("tests/emulator/build.mk")).arg("DRIVER=1");
        make.arg(format!("OUT={}", folder.display()));
        assert!(make.status().expect("make").success());
        let path = CString::new(folder.join("libcuda.so").as_os_str().as_bytes()).expect("a path");
        // SAFETY: a library of ours; it stays loaded.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) };
        assert!(!handle.is_null(), "the fake driver does not load");
        // SAFETY: the functions' types in fake_driver.cpp.
        let driver = unsafe {
            let set = |name| transmute::<Symbol, extern "C" fn(c_int)>(symbol(handle, name));
            let get = |name| transmute::<Symbol, extern "C" fn() -> c_int>(symbol(handle, name));
            Self {
                set_policy: set(c"fake_driver_policy"),
                launches: get(c"fake_driver_launches"),
                fault: set(c"fake_driver_fault"),
                refuse: set(c"fake_driver_refuse"),
                is_idle: get(c"fake_driver_is_idle"),
                waits_for_all: get(c"fake_driver_waits_for_all"),
                functions_loaded: get(c"fake_driver_functions_loaded"),
            }
        };
        driver.make_current(0);
        Some(driver)
    }

    /// Makes a device's context this thread's, for the calls of the test itself.
    pub(crate) fn make_current(&self, device: c_int) {
        // SAFETY: the driver is loaded; its contexts stay.
        unsafe {
            let context = result::primary_ctx::retain(device).expect("a context");
            result::ctx::set_current(context).expect("a context");
        }
    }

    /// How streams are ordered from now on.
    pub(crate) fn set_policy(&self, policy: c_int) {
        (self.set_policy)(policy);
    }

    /// How many kernels were put on streams so far.
    pub(crate) fn launches(&self) -> usize {
        (self.launches)().try_into().expect("a count")
    }

    /// Makes the work that comes `works` from now fail, and its context with it.
    pub(crate) fn plant_fault(&self, works: c_int) {
        assert!(works > 0);
        (self.fault)(works);
    }

    /// Refuses the launch that comes `launches` from now, without further effects.
    pub(crate) fn refuse_launch(&self, launches: c_int) {
        (self.refuse)(launches);
    }

    /// Whether all work of the thread's context has run.
    pub(crate) fn is_idle(&self) -> bool {
        (self.is_idle)() != 0
    }

    /// How often the host has waited for all streams of a context that had work.
    pub(crate) fn waits_for_all(&self) -> c_int {
        (self.waits_for_all)()
    }

    /// How many kernels of modules have been asked for, each of which loads its code.
    pub(crate) fn functions_loaded(&self) -> c_int {
        (self.functions_loaded)()
    }

    /// Forgets errors and work of all contexts, as a new process would.
    pub(crate) fn heal(&self) {
        (self.fault)(0);
    }

    /// A launcher on the default stream.
    pub(crate) fn launcher(&self) -> Launcher {
        self.launcher_on(ptr::null_mut())
    }

    /// A launcher on a stream.
    pub(crate) fn launcher_on(&self, stream: sys::CUstream) -> Launcher {
        // SAFETY: the default stream, or one of the test's that outlives the launcher.
        unsafe { Launcher::new(0, stream.cast()) }.expect("a launcher")
    }
}

/// A function that the stand-in has for tests.
fn symbol(handle: Symbol, name: &CStr) -> Symbol {
    // SAFETY: a loaded library, and a name with its end.
    let found = unsafe { libc::dlsym(handle, name.as_ptr()) };
    assert!(!found.is_null(), "the fake driver has no {name:?}");
    found
}

/// Runs what was put on the default stream.
pub(crate) fn finish() {
    // SAFETY: the default stream.
    unsafe { result::stream::synchronize(ptr::null_mut()) }.expect("the work of the default stream");
}
