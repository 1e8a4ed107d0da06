//! Plan a placement, dispatch tokens on the CPU, and repeat an optimizer step from its record, without Python or CUDA.
//! Run with: cargo run --example plan_dispatch_replay --no-default-features

use evermoe::cpu::{self, AdamWOptions, AdamWStep, Combine, Gradient, Serial};
use evermoe::dispatch::{self, split_tokens};
use evermoe::placement::{self, allocate, place, survival};
use evermoe::replay::{Accepted, HEADER_BYTES, Header, Kind, Log, Record, Rule, Stored};
use evermoe::replay::{encode_gradient, most_payload_bytes};

const EXPERTS: usize = 4;
const NODES: usize = 3;
const SLOTS: usize = 3; // replicas of experts on each node

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let matrix = plan()?;
    dispatch_tokens(&matrix)?;
    replay_a_step()
}

/// Place the experts by their load, so that each keeps a replica when any one node is lost.
fn plan() -> evermoe::Result<Vec<i64>> {
    let load = [50.0, 20.0, 20.0, 10.0];
    let replicas = allocate(&load, NODES, SLOTS, 2)?;
    let request = placement::Request {
        replicas: &replicas,
        nodes: NODES,
        slots: SLOTS,
        policy: placement::Policy::Balanced,
        load: Some(&load),
        previous: None,
        domains: None,
        failures: None,
    };
    let placement = place(&request)?;
    println!("replicas {replicas:?}: {}", placement.reason);

    // The nodes that hold each expert, from the matrix [nodes, experts] of replicas.
    let holds = |node: &usize, expert: usize| placement.matrix[node * EXPERTS + expert] > 0;
    let holders: Vec<Vec<usize>> =
        (0..EXPERTS).map(|expert| (0..NODES).filter(|node| holds(node, expert)).collect()).collect();
    let found = survival(NODES, &holders, 1, None, 0)?;
    println!("one of {NODES} nodes fails: every expert survives with probability {:.2}", found.probability);
    assert_eq!(found.probability, 1.0);
    Ok(placement.matrix)
}

/// Send the tokens of rank 0 to the ranks that hold their experts, and combine the results.
fn dispatch_tokens(matrix: &[i64]) -> evermoe::Result<()> {
    let (top_k, width) = (2, 3);
    let x = [1.0_f32, 2.0, 3.0, 4.0, 5.0, 6.0]; // two tokens
    let ids = [0_i32, 1, 0, 3]; // two experts for each
    let mut counts = [0; EXPERTS];
    cpu::histogram(&ids, &mut counts, &Serial)?;

    // Tokens of each expert on each rank: the other ranks have none in this example.
    let mut tokens = [0; EXPERTS * NODES];
    counts.iter().enumerate().for_each(|(expert, &count)| tokens[expert * NODES] = count);
    let split = split_tokens(&tokens, matrix, EXPERTS, NODES, 0, dispatch::Policy::Balanced)?;
    println!("rank 0 sends, by expert and rank: {:?}", split.send);

    let (mut row_ids, mut positions) = ([0_i32; 4], [0_i32; 4]);
    cpu::dispatch_plan(&ids, &split.send, EXPERTS, &mut row_ids, &mut positions, &Serial)?;
    let mut rows = [0.0; 4 * 3];
    cpu::permute(&x, &row_ids, top_k, width, &mut rows, &Serial)?;

    // An all-to-all would exchange the rows. Here every expert doubles its rows at once.
    rows.iter_mut().for_each(|value| *value *= 2.0);
    let weights = [0.75, 0.25, 0.5, 0.5];
    let combine = Combine { rows: &rows, positions: &positions, weights: Some(&weights), width, top_k };
    let mut combined = [0.0; 6];
    cpu::unpermute(&combine, &mut combined, &Serial)?;
    assert_eq!(combined, x.map(|value| 2.0 * value));
    Ok(())
}

/// Train one step, send its record instead of the state, and repeat it on a replica: the same bits.
fn replay_a_step() -> Result<(), Box<dyn std::error::Error>> {
    const UNIT: u64 = 7; // a digest of the unit's name
    let gradient = [0.1_f32, -0.2, 0.3, 0.7];
    let start = [[1.0_f32, 2.0, 3.0, 4.0], [0.0; 4], [0.0; 4]]; // weights, first and second moment

    // The trainer takes a step, and seals the gradient and the step's numbers in a record.
    let options =
        AdamWOptions { lr: 1e-3, betas: [0.9, 0.999], eps: 1e-8, weight_decay: 0.1, maximize: false };
    let step = AdamWStep::new(&options, 1, 1.0, 1.0)?;
    let [mut weights, mut first, mut second] = start;
    cpu::adamw(&mut weights, &mut first, &mut second, None, &[(step, Gradient::F32(&gradient))], &Serial);
    let record = record(UNIT, &gradient, step);

    // The replica has the state before the step, and logs the record until it repeats the step.
    let mut log = Log::new(&[(UNIT, 4, 48)], 1 << 16)?;
    log.begin(0, 0);
    log.installed(0);
    let accepted = log.accept(&record, &Serial).map_err(|(_, fault)| fault)?;
    assert_eq!(accepted, Accepted::Logged { unit: 0 });
    let batch = log.take(0, 8, u64::MAX, &Serial).ok_or("no step is logged")?;
    assert!(batch.is_intact(&Serial));
    let numbers = batch.numbers.as_slice().try_into()?;
    let Some(Stored::F32(logged)) = &batch.gradients[0] else { return Err("the gradient is float32".into()) };
    let [mut replica, mut first, mut second] = start;
    let steps = [(AdamWStep::from_array(numbers)?, Gradient::F32(logged))];
    cpu::adamw(&mut replica, &mut first, &mut second, None, &steps, &Serial);
    log.applied(0, batch.epoch, batch.version, batch.bytes);

    assert_eq!(replica.map(f32::to_bits), weights.map(f32::to_bits));
    println!("the replica has version {:?} of the unit: {replica:?}", log.version(0));
    Ok(())
}

/// Seal the record of a unit's first step.
fn record(unit: u64, gradient: &[f32], step: AdamWStep) -> Vec<u8> {
    let elements = gradient.len();
    let mut payload = vec![0; most_payload_bytes(elements)];
    let encoded = encode_gradient(Gradient::F32(gradient), elements, false, &mut payload, &Serial);
    let header = Header {
        kind: Kind::Step,
        encoding: encoded.encoding,
        rule: Rule::AdamW(step.to_array()),
        unit,
        step: 1,
        t: 1,
        elements,
        payload_bytes: encoded.payload_bytes,
    };
    let record = [&header.seal(encoded.digest), &payload[..encoded.payload_bytes]].concat();
    assert!(record.len() > HEADER_BYTES && Record::parse(&record).is_ok());
    record
}
