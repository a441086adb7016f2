//! `examples/serve`, run as a user runs it. `cargo test` builds it; `cargo test --test serve` does not.
#![cfg(all(unix, feature = "blas"))]

use std::{
    env,
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    process::{Child, Command, Stdio},
};

/// The server on two software GPUs.
fn serve(arguments: &[&str]) -> Child {
    let test = env::current_exe().unwrap();
    let program = test.ancestors().nth(2).unwrap().join("examples/serve");
    assert!(program.is_file(), "{} is not there: build it with `cargo build --example serve`", program.display());
    Command::new(program).args(arguments).env("GPU_POOL_BACKEND", "host:2").stdout(Stdio::piped()).spawn().unwrap()
}

#[test]
fn its_own_clients_get_their_answers() {
    let output = serve(&["--requests", "300", "--clients", "20", "--batch", "7"]).wait_with_output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}");
    let counts = text.lines().find_map(|line| line.strip_prefix("300 requests in ")).unwrap();
    let batches: usize = counts.strip_suffix(" batches").unwrap().parse().unwrap();
    assert!((300_usize.div_ceil(7)..=300).contains(&batches), "{text}");
    assert!(text.contains("99 %: "), "{text}");
}

#[test]
fn ctrl_c_ends_it_once_what_it_has_read_is_answered() {
    // A batch that is not full waits for two seconds.
    let mut server = serve(&["--wait", "2000000"]);
    let mut lines = BufReader::new(server.stdout.take().unwrap());
    let mut line = String::new();
    while !line.starts_with("listening on ") {
        line.clear();
        assert_ne!(lines.read_line(&mut line).unwrap(), 0, "it has ended");
    }
    let mut client = TcpStream::connect(line["listening on ".len()..].trim()).unwrap();
    let mut answers = BufReader::new(client.try_clone().unwrap());
    let mut ask = |text: &str| {
        client.write_all(text.as_bytes()).unwrap();
        let mut answer = String::new();
        answers.read_line(&mut answer).unwrap();
        answer
    };
    for wrong in ["\n".to_owned(), "1,2\n".to_owned(), "17,".repeat(63) + "0\n", "x,".repeat(63) + "0\n"] {
        assert_eq!(ask(&wrong), "error: expected 64 pixels from 0 to 16, separated by commas\n");
    }
    let pixels = "8,".repeat(63) + "16\n";
    let digit = ask(&pixels);
    assert!((0..10).contains(&digit.trim().parse::<u32>().unwrap()));

    client.write_all(pixels.as_bytes()).unwrap();
    // The server reads it in that time. If it did not, there would be no answer.
    std::thread::sleep(std::time::Duration::from_secs(1));
    // SAFETY: it is this test's child, which has not been waited for.
    assert_eq!(unsafe { libc::kill(server.id() as i32, libc::SIGINT) }, 0);
    let mut rest = String::new();
    answers.read_to_string(&mut rest).unwrap();
    assert_eq!(rest, digit, "the last answer, and the end of the connection");
    let mut text = String::new();
    lines.read_to_string(&mut text).unwrap();
    assert_eq!(text, "2 requests in 2 batches\nended by ctrl-c\n");
    assert!(server.wait().unwrap().success());
}
