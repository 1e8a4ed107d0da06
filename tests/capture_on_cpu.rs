//! Capture into CUDA graphs with the stand-in driver, which refuses calls that CUDA does not allow during a capture.
//!
//! Needs g++ and make on x86-64 and a build with kernels; otherwise it passes silently.
#![cfg(all(feature = "cuda", target_arch = "x86_64", target_os = "linux"))]

use cudarc::driver::result::{self, stream::StreamKind};
use cudarc::driver::sys::{self, CUresult, CUstreamCaptureMode};
use driver::Driver;
use evermoe::cpu::{ChunkLayout, fp8_row_bytes};
use evermoe::cuda::{self, ChunkCopier, FloatType, HostMemory, Launcher, PinnedBuffer, Span, Staging};
use std::ptr::null_mut;

#[path = "emulator/driver.rs"]
#[allow(dead_code, reason = "each test uses its part")]
mod driver;

const GLOBAL: CUstreamCaptureMode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
const UNSUPPORTED: CUresult = CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
const INVALIDATED: CUresult = CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
const TOKENS: usize = 37;
const TOP_K: usize = 2;
const SLOTS: usize = TOKENS * TOP_K;
const EXPERTS: usize = 5;
const RANKS: usize = 3;
const WIDTH: usize = 8;

fn at<T>(values: &[T]) -> u64 {
    values.as_ptr() as u64
}

fn at_mut<T>(values: &mut [T]) -> u64 {
    values.as_mut_ptr() as u64
}

// A single test, as a process has one driver.
#[test]
fn token_ops_are_captured() {
    let Some(driver) = Driver::load() else { return };
    drop(driver.launcher()); // opens the device, which a capture does not allow
    replays(&driver);
    forbidden_calls_are_found();
    the_default_stream_does_not_mix_with_captures(&driver);
    a_span_table_is_refused(&driver);
    copies_go_on_beside_a_capture(&driver);
}

/// A stream in capture mode, as torch uses it: from `new` to `end`.
struct Capturing(sys::CUstream);

impl Capturing {
    fn new(kind: StreamKind) -> Self {
        let stream = result::stream::create(kind).unwrap();
        // SAFETY: a live stream.
        unsafe { sys::cuStreamBeginCapture_v2(stream, GLOBAL) }.result().unwrap();
        Self(stream)
    }

    fn end(self) -> Result<sys::CUgraph, CUresult> {
        let mut graph = null_mut();
        // SAFETY: a stream in capture mode, and a pointer to a graph.
        unsafe { sys::cuStreamEndCapture(self.0, &raw mut graph) }.result().map_err(|error| error.0)?;
        Ok(graph)
    }
}

/// Inputs and results of the token ops.
#[derive(PartialEq, Debug)]
struct Tokens {
    ids: Vec<i32>,
    send_counts: Vec<i64>,
    counts: Vec<i64>,
    scratch: Vec<u32>,
    row_ids: Vec<i64>,
    positions: Vec<i64>,
    x: Vec<f32>,
    rows: Vec<f32>,
    regrouped: Vec<f32>,
    regroup_scratch: Vec<u64>,
    out: Vec<f32>,
    grad_rows: Vec<f32>,
    grad_weights: Vec<f32>,
    weights: Vec<f32>,
    inverse: Vec<i64>,
    replicas: Vec<i64>,
    send: Vec<i64>,
    receive: Vec<i64>,
    packed: Vec<u128>,
    unpacked: Vec<f32>,
}

impl Tokens {
    fn new() -> Self {
        let ids: Vec<i32> = (0..SLOTS as i32).map(|slot| slot * slot % 97 % EXPERTS as i32).collect();
        let mut send_counts = vec![0; EXPERTS * RANKS];
        ids.iter().enumerate().for_each(|(slot, &id)| send_counts[id as usize * RANKS + slot % RANKS] += 1);
        Self {
            ids,
            send_counts,
            counts: vec![9; EXPERTS],
            scratch: vec![9; cuda::Plan::scratch_bytes(SLOTS, EXPERTS, RANKS).div_ceil(4)],
            row_ids: vec![9; SLOTS],
            positions: vec![9; SLOTS],
            x: (0..TOKENS * WIDTH).map(|i| i as f32 / 7.0).collect(),
            rows: vec![9.0; SLOTS * WIDTH],
            regrouped: vec![9.0; SLOTS * WIDTH],
            regroup_scratch: vec![9; cuda::Regroup::scratch_words(RANKS, EXPERTS)],
            out: vec![9.0; TOKENS * WIDTH],
            grad_rows: vec![9.0; SLOTS * WIDTH],
            grad_weights: vec![9.0; SLOTS],
            weights: (0..SLOTS).map(|slot| slot as f32 / 11.0).collect(),
            inverse: vec![9; SLOTS],
            replicas: vec![1; EXPERTS * RANKS],
            send: vec![9; EXPERTS * RANKS],
            receive: vec![9; EXPERTS * RANKS],
            packed: vec![9; TOKENS * fp8_row_bytes(WIDTH) / 16],
            unpacked: vec![9.0; TOKENS * WIDTH],
        }
    }

    /// Clears the results, in the same memory.
    fn clear(&mut self) {
        for words in [&mut self.counts, &mut self.row_ids, &mut self.positions, &mut self.inverse] {
            words.fill(9);
        }
        for words in
            [&mut self.rows, &mut self.regrouped, &mut self.out, &mut self.grad_rows, &mut self.unpacked]
        {
            words.fill(9.0);
        }
        self.grad_weights.fill(9.0);
        self.send.fill(9);
        self.receive.fill(9);
        self.packed.fill(9);
        self.scratch.fill(9);
        self.regroup_scratch.fill(9);
    }

    /// Launches all token ops.
    ///
    /// # Safety
    /// `self` must live until the stream has passed them.
    unsafe fn launch(&mut self, launcher: &Launcher) -> evermoe::Result<()> {
        let layer = cuda::LayerIds { ids: at(&self.ids), wide_ids: false, num_slots: SLOTS };
        let plan = cuda::Plan {
            ids: at(&self.ids),
            wide_ids: false,
            send_counts: at(&self.send_counts),
            scratch: at_mut(&mut self.scratch),
            row_ids: at_mut(&mut self.row_ids),
            positions: at_mut(&mut self.positions),
            wide: true,
            num_slots: SLOTS,
            num_experts: EXPERTS,
            num_ranks: RANKS,
        };
        let permute = cuda::Permute {
            x: at(&self.x),
            row_ids: plan.row_ids,
            positions: plan.positions,
            wide_ids: true,
            wide_positions: true,
            out: at_mut(&mut self.rows),
            num_rows: SLOTS,
            row_bytes: WIDTH * 4,
            num_tokens: TOKENS,
            top_k: TOP_K,
        };
        let regroup = cuda::Regroup {
            rows: permute.out,
            counts: at(&self.send_counts),
            scratch: at_mut(&mut self.regroup_scratch),
            out: at_mut(&mut self.regrouped),
            num_rows: SLOTS,
            row_bytes: WIDTH * 4,
            num_sources: RANKS,
            num_experts: EXPERTS,
            inverse: false,
        };
        let combine = cuda::Combine {
            rows: permute.out,
            positions: plan.positions,
            wide: true,
            weights: at(&self.weights),
            out: at_mut(&mut self.out),
            row_type: FloatType::F32,
            weight_type: FloatType::F32,
            num_tokens: TOKENS,
            top_k: TOP_K,
            num_rows: SLOTS,
            width: WIDTH,
        };
        let backward = cuda::Backward {
            forward: cuda::Combine { out: at(&self.x), ..combine },
            row_ids: at_mut(&mut self.inverse),
            grad_rows: at_mut(&mut self.grad_rows),
            grad_weights: at_mut(&mut self.grad_weights),
        };
        let split = cuda::SplitTokens {
            tokens: at(&self.send_counts),
            replicas: at(&self.replicas),
            send: at_mut(&mut self.send),
            receive: at_mut(&mut self.receive),
            num_experts: EXPERTS,
            num_ranks: RANKS,
            rank: 1,
        };
        let quantize = cuda::Fp8Rows {
            rows: at(&self.x),
            packed: at_mut(&mut self.packed),
            row_type: FloatType::F32,
            num_rows: TOKENS,
            width: WIDTH,
        };
        // SAFETY: arrays of the stated lengths, by the caller's promise.
        unsafe {
            launcher.histograms(&[layer], at_mut(&mut self.counts), EXPERTS)?;
            launcher.dispatch_plan(&plan)?;
            launcher.permute(&permute)?;
            launcher.regroup(&regroup)?;
            launcher.unpermute(&combine)?;
            launcher.unpermute_backward(&backward)?;
            launcher.invert_positions(plan.positions, at_mut(&mut self.inverse), true, SLOTS, SLOTS)?;
            launcher.quantize_rows(&quantize)?;
            launcher.dequantize_rows(&cuda::Fp8Rows { rows: at_mut(&mut self.unpacked), ..quantize })?;
            launcher.split_tokens(&split)
        }
    }
}

/// Nothing runs during the capture; each launch of the graph has the effect of the ops.
fn replays(driver: &Driver) {
    let (mut expected, mut tokens, fresh) = (Tokens::new(), Tokens::new(), Tokens::new());
    // SAFETY: the arrays live until the stream is finished.
    unsafe {
        expected.launch(&driver.launcher()).unwrap();
        driver::finish();
        assert_ne!(expected, fresh);
        let capturing = Capturing::new(StreamKind::NonBlocking);
        let stream = capturing.0;
        tokens.launch(&driver.launcher_on(stream)).unwrap();
        assert_eq!(tokens, fresh);
        let (graph, mut graph_exec) = (capturing.end().expect("a complete graph"), null_mut());
        sys::cuGraphInstantiateWithFlags(&raw mut graph_exec, graph, 0).result().unwrap();
        for _ in 0..2 {
            tokens.clear();
            sys::cuGraphLaunch(graph_exec, stream).result().unwrap();
            result::stream::synchronize(stream).unwrap();
            assert_eq!(tokens, expected);
        }
        sys::cuGraphExecDestroy(graph_exec).result().unwrap();
        sys::cuGraphDestroy(graph).result().unwrap();
        result::stream::destroy(stream).unwrap();
    }
}

/// Operations that are forbidden during a capture: each is refused and leaves no graph.
fn forbidden_calls_are_found() {
    // SAFETY: live streams and events; memory of the stated sizes, given back once.
    unsafe {
        let other = result::stream::create(StreamKind::NonBlocking).unwrap();
        let event = result::event::create(sys::CUevent_flags::CU_EVENT_BLOCKING_SYNC).unwrap();
        let memory = result::malloc_sync(64).unwrap();
        let host = [0_u8; 64];
        let calls: [&dyn Fn(sys::CUstream) -> CUresult; 10] = [
            &|stream| sys::cuStreamSynchronize(stream),
            &|stream| sys::cuStreamQuery(stream),
            &|_| sys::cuStreamSynchronize(other),
            &|_| sys::cuEventSynchronize(event),
            &|_| sys::cuEventQuery(event),
            &|_| sys::cuCtxSynchronize(),
            &|_| sys::cuMemAlloc_v2(&mut 0, 64),
            &|_| sys::cuMemHostAlloc(&mut null_mut(), 64, 0),
            &|_| sys::cuMemFree_v2(memory),
            &|stream| sys::cuMemcpyHtoDAsync_v2(memory, host.as_ptr().cast(), 64, stream),
        ];
        for (number, call) in calls.iter().enumerate() {
            let capturing = Capturing::new(StreamKind::NonBlocking);
            assert_eq!(call(capturing.0), UNSUPPORTED, "call {number}");
            assert_eq!(capturing.end(), Err(INVALIDATED), "call {number}");
        }
        // A query of an event of the graph itself; an event outside of the graph cannot be waited for.
        let capturing = Capturing::new(StreamKind::NonBlocking);
        result::event::record(event, capturing.0).unwrap();
        assert_eq!(sys::cuEventQuery(event), CUresult::CUDA_ERROR_CAPTURED_EVENT);
        result::event::record(event, other).unwrap();
        assert_eq!(
            sys::cuStreamWaitEvent(capturing.0, event, 0),
            CUresult::CUDA_ERROR_STREAM_CAPTURE_ISOLATION
        );
        assert_eq!(capturing.end(), Err(INVALIDATED));
        result::free_sync(memory).unwrap();
        result::event::destroy(event).unwrap();
        result::stream::destroy(other).unwrap();
    }
}

/// A launch on the default stream, for which a stream in capture mode would have to wait.
fn the_default_stream_does_not_mix_with_captures(driver: &Driver) {
    for (kind, is_whole) in [(StreamKind::Default, false), (StreamKind::NonBlocking, true)] {
        let capturing = Capturing::new(kind);
        let mut tokens = Tokens::new();
        // SAFETY: the arrays live until the default stream is finished, or nothing is launched.
        let launched = unsafe { tokens.launch(&driver.launcher()) };
        assert_eq!((launched.is_ok(), capturing.end().is_ok()), (is_whole, is_whole));
        driver::finish();
    }
}

/// The only launcher that reads the host's memory refuses by itself, and does not invalidate the graph.
fn a_span_table_is_refused(driver: &Driver) {
    let capturing = Capturing::new(StreamKind::NonBlocking);
    let table = [Span { at: 0, start: 0, bytes: 0 }];
    // SAFETY: refused before it reads.
    let refused = unsafe { driver.launcher_on(capturing.0).upload_spans(&table, 16) };
    assert!(refused.unwrap_err().to_string().contains("not being captured into a CUDA graph"));
    capturing.end().expect("a complete graph");
}

/// A copier's waits and page-locking, in another thread and in the capturing one, do not invalidate torch's graph.
fn copies_go_on_beside_a_capture(driver: &Driver) {
    let layout = ChunkLayout::new(&[10_000], 4096).unwrap();
    let staging = Staging { count: 2, bytes: 4096 };
    let tensor = vec![7_u8; 10_000];
    let mut workspace = vec![0_u128; ChunkCopier::workspace_bytes(&layout, staging).unwrap().div_ceil(16)];
    let workspace = at_mut(&mut workspace);
    let stream = result::stream::create(StreamKind::NonBlocking).unwrap();
    // SAFETY: memory of the stated sizes, which outlives the copier; a live stream.
    let new = || unsafe {
        ChunkCopier::new(
            0,
            stream.cast(),
            layout.clone(),
            &[at(&tensor)],
            workspace,
            staging,
            HostMemory::Own,
        )
        .unwrap()
    };
    let copier = new();
    let torch = stream.expose_provenance();
    let work = || {
        let all = 0..copier.layout().num_chunks();
        let torch = std::ptr::with_exposed_provenance_mut(torch);
        // SAFETY: a live stream; the tensors are not written.
        unsafe { copier.save(torch, all.clone()).unwrap() };
        while !copier.is_done(all.clone()).unwrap() {}
        copier.wait(all).unwrap();
        drop(PinnedBuffer::new(0, 64).unwrap());
    };
    let capturing = Capturing::new(StreamKind::NonBlocking);
    std::thread::scope(|scope| scope.spawn(work).join().unwrap());
    work();
    // SAFETY: a live stream; refused before anything is asked for.
    let refused = unsafe { copier.save(capturing.0.cast(), 0..1) };
    assert!(refused.unwrap_err().to_string().contains("not being captured into a CUDA graph"));
    drop(copier); // waits for its streams
    capturing.end().expect("a complete graph");
    // The same calls without evermoe's precautions invalidate the graph, even from another thread.
    let capturing = Capturing::new(StreamKind::NonBlocking);
    std::thread::scope(|scope| {
        let ask = || {
            driver.make_current(0);
            // SAFETY: the size is not zero, and it is refused.
            unsafe { sys::cuMemHostAlloc(&mut null_mut(), 64, 0) }
        };
        assert_eq!(scope.spawn(ask).join().unwrap(), UNSUPPORTED);
    });
    assert_eq!(capturing.end(), Err(INVALIDATED));
}
