"""Packaging of dgr2_jax: block-diffusion re-ranking in JAX."""

import pathlib

import setuptools

ROOT = pathlib.Path(__file__).parent

setuptools.setup(
    name='dgr2_jax',
    version='0.1.0',
    description='Diffusion-GR2 in JAX/Flax: generative reasoning re-ranking '
                'with block diffusion, on TPUs and GPUs.',
    long_description=(ROOT / 'README.md').read_text(encoding='utf-8'),
    long_description_content_type='text/markdown',
    url='https://github.com/dgr2-jax/dgr2_jax',
    license='Apache-2.0',
    # So an editable install is a plain path, which wins over a directory of this
    # name, such as the clone's, beside the script that runs.
    package_dir={'': '.'},
    packages=setuptools.find_packages(include=['dgr2_jax', 'dgr2_jax.*']),
    python_requires='>=3.11',
    install_requires=[
        'absl-py>=2.1',
        'array-record>=0.5.1',
        'etils>=1.9',
        'flax>=0.10.6',
        'grain>=0.2.11',
        'jax>=0.8.0',
        'matplotlib>=3.9',
        'ml-collections>=1.0',
        'numpy>=2.0',
        'optax>=0.2.4',
        'orbax-checkpoint>=0.11.19',
        'scikit-learn>=1.5',
        'scipy>=1.13',
        'tensorboardX>=2.6',
        'tensorflow-datasets>=4.9.8',
        'threadpoolctl>=3.5',
        'tokenizers>=0.20',
        'tqdm>=4.66',
    ],
    extras_require={
        'tpu': ['jax[tpu]>=0.8.0'],
        'cuda': ['jax[cuda12]>=0.8.0'],
        'traces': ['httpx2>=2.0'],
        'hf': ['safetensors>=0.4.5'],
        'encoder': ['torch>=2.4', 'transformers>=4.56'],
        'test': [
            'httpx2>=2.0',
            'hypothesis>=6.100',
            'ipykernel>=6.29',
            'nbclient>=0.11',
            'nbformat>=5.10',
            'pytest>=8.0',
            'pytest-xdist>=3.6',
            'ranx>=0.3.20',
            'safetensors>=0.4.5',
        ],
        # Live comparisons with PyTorch; without it tests read stored figures.
        'parity': ['accelerate>=1.0', 'gguf>=0.10', 'torch>=2.4',
                   'transformers>=4.51'],
    },
    classifiers=[
        'Programming Language :: Python :: 3.11',
        'Programming Language :: Python :: 3.12',
        'Topic :: Scientific/Engineering :: Artificial Intelligence',
    ],
)
