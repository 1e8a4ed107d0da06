//! Compiles the CUDA kernels when an nvcc can be found.
fn main() {
    println!("cargo:rerun-if-changed=build.rs");
}
